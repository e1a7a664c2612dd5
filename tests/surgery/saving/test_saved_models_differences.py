"""Silent changes that a saved model must not have, and harm that a folder must not do."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from refusals import refuses
from surgery.foreign_models import FAMILIES, PADDED, run, seeded, torch_encoder, transformers
from surgery.saving.test_saved_models import WEIGHTS, Mine, edit_record, small, train_once

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def swapped_bert(to: str = "bn", **options: Any) -> nn.Module:
    model, _ = FAMILIES["bert"]()
    powernorm.swap(model, to, **options)
    return model


# A folder runs nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("sys:exit", {}),
        ("os:_exit", {}),
        ("dataclasses:_create_fn", {"args": [""], "body": [""]}),
        ("torch.nn:Linear", {"out_features": 3}),  # there from another module
        ("powernorm:version.__version__", {}),
    ],
)
def test_nothing_is_called_that_a_record_names(
    norm: str, options: dict[str, Any], tmp_path: Path
) -> None:
    powernorm.save(small(), tmp_path)
    before = list(sys.path)
    edit_record(tmp_path, lambda one: one["modules"][0].update(norm=norm, options=options))
    with pytest.raises(InputError, match="is not a class of a module that this process has loaded"):
        powernorm.load(tmp_path, small())
    assert sys.path == before


def test_what_a_configuration_could_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code beside the weights, and kernels of attention from elsewhere."""
    transformers()
    powernorm.save(swapped_bert(), tmp_path)
    edit_record(tmp_path, lambda record: record.update(attention="someone/kernel"))
    assert powernorm.load(tmp_path).config._attn_implementation == "sdpa"
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    own = {"model_type": "evil", "architectures": ["BertModel"], "auto_map": code}
    powernorm.save(small(), tmp_path / "own", config=own)
    refuses("gives no model", powernorm.load, tmp_path / "own")


# Files that do not belong together ---------------------------------------------------------------


def test_one_file_and_an_index_of_older_ones(tmp_path: Path) -> None:
    model = swapped_bert()
    model.save_pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    assert torch.equal(powernorm.load(tmp_path).pooler.dense.weight, model.pooler.dense.weight)
    (tmp_path / "model.safetensors").unlink()
    refuses(r"index\.json is damaged", powernorm.load, tmp_path)


# A given model -----------------------------------------------------------------------------------


def encoder(**options: Any) -> nn.Module:
    arguments = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
    layer = nn.TransformerEncoderLayer(**{**arguments, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def row(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), *parts)


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        *(
            (encoder(), encoder(**options), message)
            for options, message in (
                ({"activation": "gelu"}, "activation=relu.* there and .*activation=gelu"),
                ({"activation": nn.GELU()}, r"s\.0 is TransformerEncoderLayer\(activation=relu"),
                ({"norm_first": True}, "norm_first=False.* there and .*norm_first=True"),
                ({"batch_first": False}, "batch_first=True.* there and .*batch_first=False"),
                ({"nhead": 4}, "num_heads=2.* there and .*num_heads=4"),
                ({"dropout": 0.5}, r"dropout=0\.1.* there and .*dropout=0\.5"),
            )
        ),
        (row(nn.ReLU()), row(), r"2 is ReLU\(\) there and nothing here"),
        (row(nn.ReLU()), row(nn.ReLU(), nn.GELU()), r"3 is nothing there and GELU.* here"),
        (row(nn.ReLU()), row(nn.GELU()), r"2 is ReLU\(\) there and GELU"),
        (row(nn.Dropout(0.5)), row(nn.Dropout(0.0)), r"2 is Dropout\(p=0\.5.* there and Dropout"),
    ],
)
def test_modules_of_the_same_tensors_that_compute_something_else(
    saved: nn.Module, given: nn.Module, message: str, tmp_path: Path
) -> None:
    alike = copy.deepcopy(saved)
    powernorm.swap(saved, "bn")
    powernorm.save(saved, tmp_path)
    assert powernorm.load(tmp_path, alike) is alike
    refuses(message, powernorm.load, tmp_path, given)


def test_a_folded_model_is_loaded_into_a_swapped_one(tmp_path: Path) -> None:
    model = torch_encoder()
    powernorm.swap(model, "bn")
    x = torch.randn(2, 5, model.layers[0].linear1.in_features)
    model.train()(x)
    powernorm.fold(model.eval(), x)
    powernorm.save(model, tmp_path)
    given = torch_encoder()
    powernorm.swap(given, "bn")
    loaded = powernorm.load(tmp_path, given)
    assert torch.equal(loaded(x), model(x))
    assert not [part for part in loaded.modules() if part._forward_pre_hooks]


def test_a_given_model_of_another_configuration(tmp_path: Path) -> None:
    powernorm.save(swapped_bert(), tmp_path)
    given, _ = FAMILIES["bert"]()
    given.config.hidden_act = "relu"
    refuses("hidden_act of its configuration is 'gelu' there and", powernorm.load, tmp_path, given)


def test_a_given_model_has_more_norms_or_masks(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return seeded(torch_encoder)

    model, given = build(), build()
    powernorm.swap(model, "gn", where="layers.0.*")
    powernorm.save(model, tmp_path / "a")
    powernorm.swap(given, "gn")
    norm = given.layers[0].norm1
    with pytest.raises(InputError, match=r"has the norm gn at 'layers\.1\.norm1', where the saved"):
        powernorm.load(tmp_path / "a", given)
    assert given.layers[0].norm1 is norm
    model, given = build(), build()
    model.layers[0].norm1 = powernorm.BatchNorm(8)  # by hand, without the model's masks
    powernorm.save(model, tmp_path / "b")
    powernorm.swap(given, "bn", where="layers.0.norm1")
    refuses("gets a padding mask that that of the saved", powernorm.load, tmp_path / "b", given)


def test_a_class_of_ones_own_with_a_known_name(tmp_path: Path) -> None:
    hf = transformers()

    class BertModel(hf.BertModel):  # type: ignore[misc,name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    own = BertModel(FAMILIES["bert"]()[0].config)
    powernorm.swap(own, "bn")
    powernorm.save(own, tmp_path)
    refuses("build the model as it was before it was saved", powernorm.load, tmp_path)


# What stands in config.json by itself ------------------------------------------------------------


def test_the_mark_follows_the_model(tmp_path: Path) -> None:
    """Frozen statistics and settings changed since the swap are in what the Trainer writes."""
    model = swapped_bert()
    train_once(model, PADDED["bert"](1))
    powernorm.freeze_statistics(model, "encoder.layer.0.*")
    model.embeddings.LayerNorm.eps = 0.3
    model.save_pretrained(tmp_path)
    loaded = powernorm.load(tmp_path)
    assert loaded.embeddings.LayerNorm.eps == 0.3
    inputs = PADDED["bert"](2)
    assert torch.equal(train_once(loaded, inputs), train_once(model, inputs))


def test_two_parts_of_a_model_one_after_the_other(tmp_path: Path) -> None:
    model, inputs = FAMILIES["bart"]()
    powernorm.swap(model.model.encoder, "gn", groups=2)
    decoder = powernorm.swap(model.model.decoder, "gn", groups=4)
    model.save_pretrained(tmp_path / "both")
    assert torch.equal(run(powernorm.load(tmp_path / "both"), inputs), run(model.eval(), inputs))
    decoder.undo()
    model.save_pretrained(tmp_path / "one")
    assert torch.equal(run(powernorm.load(tmp_path / "one"), inputs), run(model.eval(), inputs))


def test_copies_of_a_model_have_marks_of_their_own(tmp_path: Path) -> None:
    model = swapped_bert()
    copied = copy.deepcopy(model)
    copied.embeddings.LayerNorm.eps = 0.3
    torch.save(copied, tmp_path / "model.pt")
    for name, one, eps in (
        ("model", model, 1e-5),
        ("copy", copied, 0.3),
        ("pickle", torch.load(tmp_path / "model.pt", weights_only=False), 0.3),
    ):
        one.save_pretrained(tmp_path / name)
        assert powernorm.load(tmp_path / name).embeddings.LayerNorm.eps == eps


# Tensors -----------------------------------------------------------------------------------------


class Tables(nn.Module):
    """Buffers that are in no state dict, one of them in two modules."""

    def __init__(self, table: Tensor, steps: Tensor) -> None:
        super().__init__()
        self.norm = powernorm.BatchNorm(4)
        self.first, self.second = nn.Module(), nn.Module()
        for part in (self.first, self.second):
            part.register_buffer("table", table, persistent=False)
        self.register_buffer("steps", steps, persistent=False)


def test_buffers_outside_the_state_dict(tmp_path: Path) -> None:
    steps = torch.arange(3)
    powernorm.save(Tables(torch.ones(2), steps), tmp_path)
    loaded = powernorm.load(tmp_path, Tables(torch.zeros(2), steps))
    assert loaded.first.table.tolist() == loaded.second.table.tolist() == [1.0, 1.0]
    with pytest.raises(InputError, match="the buffer steps, which is computed when it is built"):
        powernorm.load(tmp_path, Tables(torch.zeros(2), steps + 1))


def test_views_of_memory(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self, z: Tensor) -> None:
            super().__init__()
            self.norm = powernorm.BatchNorm(4)
            self.register_buffer("plain", z)
            self.register_buffer("conjugate", z.conj())
            self.register_buffer("wide", torch.ones(1).expand(3))

    z = torch.randn(3, dtype=torch.complex64)
    powernorm.save(Views(z), tmp_path)
    loaded = powernorm.load(tmp_path, Views(torch.zeros(3, dtype=torch.complex64)))
    assert torch.equal(loaded.plain, z)
    assert torch.equal(loaded.conjugate, z.conj())
    assert loaded.wide.tolist() == [1.0, 1.0, 1.0]


def test_weights_tied_by_transposition_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), powernorm.BatchNorm(3), nn.Linear(3, 4))
    model[2].weight = nn.Parameter(model[0].weight.data.t())
    refuses(r"2\.weight and 0\.weight are different views", powernorm.save, model, tmp_path / "a")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.eye(3).to_sparse(), "sparse or nested"),
        (torch.ones(3, dtype=torch.complex128), "that safetensors cannot hold"),
    ],
)
def test_tensors_that_no_file_holds(value: Tensor, match: str, tmp_path: Path) -> None:
    model = small()
    model.register_buffer("odd", value)
    refuses(match, powernorm.save, model, tmp_path)
    assert not (tmp_path / WEIGHTS).exists()


# User-defined norms ------------------------------------------------------------------------------


class Doubled(Mine):
    """Another class under the same name."""


def test_what_was_set_on_a_norm_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    monkeypatch.setattr("powernorm.norms.registry.REGISTERED", {})
    powernorm.register_norm("mine", Mine)
    model = build()
    powernorm.swap(model, "mine", factor=2.0)
    powernorm.save(model, tmp_path / "a")
    model[1].layer.factor = 5.0
    with pytest.raises(InputError, match=r"factor of a Mine is 5\.0, but it was built with 2"):
        powernorm.save(model, tmp_path / "b")
    model = build()
    powernorm.swap(model, "mine", table={1: 2.0})
    refuses("use lists instead of tuples", powernorm.save, model, tmp_path / "b")
    monkeypatch.setattr("powernorm.norms.registry.REGISTERED", {})
    powernorm.register_norm("mine", Doubled)
    refuses(r":Doubled in this process and was .*:Mine", powernorm.load, tmp_path / "a", build())


# Around the model --------------------------------------------------------------------------------


def test_an_optimizer_keeps_its_parameters(tmp_path: Path) -> None:
    model = seeded(torch_encoder)
    powernorm.swap(model, "bn")
    powernorm.save(model, tmp_path)
    given = seeded(torch_encoder)
    powernorm.swap(given, "bn")
    before = dict(given.named_parameters())
    powernorm.load(tmp_path, given)
    assert all(parameter is before[name] for name, parameter in given.named_parameters())


def test_what_is_loaded_is_not_the_file(tmp_path: Path) -> None:
    """Another program writes a newer model there, with `cp` or `rsync --inplace`."""
    powernorm.save(small(), tmp_path)
    loaded = powernorm.load(tmp_path, small())
    before = loaded[1].weight.clone()
    with (tmp_path / WEIGHTS).open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(bytes(len(content)))
    assert torch.equal(loaded[1].weight, before)
    assert all(p.data_ptr() % 64 == 0 for p in loaded.parameters())


def test_wrappers_do_not_see_what_is_loaded(tmp_path: Path) -> None:
    powernorm.save(small(), tmp_path)
    with pytest.raises(InputError, match="give the inner model, and wrap it afterwards"):
        powernorm.load(tmp_path, torch.compile(small()))
    inner = nn.Sequential(torch.compile(nn.Linear(4, 4)), powernorm.BatchNorm(4))
    refuses("'0' is compiled", powernorm.save, inner, tmp_path / "a")


def test_loading_without_gradients_leaves_trainable_parameters(tmp_path: Path) -> None:
    powernorm.save(small().double(), tmp_path)
    given = small()
    with torch.inference_mode():
        loaded = powernorm.load(tmp_path, given)
    loaded.train()(torch.randn(5, 4, dtype=torch.float64)).sum().backward()
    assert loaded[1].weight.grad is not None


def test_settings_of_generation_are_the_models_own(tmp_path: Path) -> None:
    model, _ = FAMILIES["gpt2"]()
    powernorm.swap(model, "bn")
    model.generation_config.max_new_tokens = 7
    model.generation_config.temperature = 0.5  # which transformers writes to no file so
    powernorm.save(model, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 99}')
    found = powernorm.load(tmp_path).generation_config
    assert (found.max_new_tokens, found.temperature) == (7, 0.5)


def test_attention_of_each_part(tmp_path: Path) -> None:
    hf = transformers()
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    sizes = {"intermediate_size": 16}
    model = hf.CLIPModel(
        hf.CLIPConfig(text_config=text | sizes, vision_config=vision | sizes | {"image_size": 8})
    )
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    powernorm.swap(model, "bn")
    powernorm.save(model, tmp_path)
    config = powernorm.load(tmp_path).config
    assert config.text_config._attn_implementation == "eager"
    assert config.vision_config._attn_implementation == "sdpa"


class Around(nn.Module):
    """A wrapper whose mask is for what it does itself: the model inside is called without one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = FAMILIES["bert"]()[0]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=input_ids).last_hidden_state
        return hidden * attention_mask.unsqueeze(-1)


@pytest.mark.filterwarnings("ignore::powernorm.MaskWarning")
def test_masks_come_from_where_they_came(tmp_path: Path) -> None:
    model = Around()
    powernorm.swap(model.model, "bn")  # its own mask alone, which it is not given
    powernorm.save(model, tmp_path)
    loaded = powernorm.load(tmp_path, Around())
    inputs = PADDED["bert"](2)
    for one in (model, loaded):
        one.train()(**inputs)
    state, other = model.state_dict(), loaded.state_dict()
    assert [name for name in state if not torch.equal(state[name], other[name])] == []


def test_padding_of_batch_norms_and_convolutions(tmp_path: Path) -> None:
    class Convolutional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)

        def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
            y: Tensor = self.norm(self.conv(x.transpose(1, 2)))
            return y.transpose(1, 2).masked_fill(padding_mask.unsqueeze(-1), 0.0)

    torch.manual_seed(0)
    model = Convolutional()
    powernorm.mask_batch_norms(model)
    x, padding = torch.randn(2, 6, 4), torch.arange(6) >= torch.tensor([[6], [3]])
    model(x, padding)
    powernorm.save(model, tmp_path)
    loaded = powernorm.load(tmp_path, Convolutional())
    assert torch.equal(loaded(x, padding), model.eval()(x, padding))
    assert torch.equal(loaded.train()(x, padding), model.train()(x, padding))
    alone = loaded.eval()(x[1:, :3], padding[1:, :3])
    torch.testing.assert_close(loaded(x, padding)[1:, :3], alone)
    powernorm.load(tmp_path, loaded)  # whose convolution has its hook already
    assert len(loaded.conv._forward_pre_hooks) == 1


def test_a_stock_checkpoint_is_compared_beyond_the_norms(tmp_path: Path) -> None:
    model, _ = FAMILIES["bert"]()
    powernorm.swap(model, "ln", where="encoder.*")
    model.embeddings.LayerNorm.eps = 0.3
    with pytest.raises(InputError, match=r"embeddings\.LayerNorm is LayerNorm.*eps=0\.3"):
        powernorm.save(model, tmp_path / "a", stock=True)
