"""Swapped and folded models in folders: the loaded state, also in a new process."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.errors import InputError
from refusals import refuses
from surgery.foreign_models import FAMILIES, PADDED, Inputs, run, transformers
from surgery.static_models import settle, static_family

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WEIGHTS, CONFIG = "powernorm.safetensors", "config.json"


def small() -> nn.Module:
    return nn.Sequential(powernorm.BatchNorm(4), nn.Linear(4, 3, bias=False))


def folded_small() -> nn.Module:
    model = settle(small())
    powernorm.fold(model, torch.randn(2, 4))
    return model


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "name",
    some_default(
        ["bert", "gpt2", "language-model", "torch-encoder", "bart", "t5", "timm-vit", "patchtst"],
        "gpt2",
        "torch-encoder",
    ),
)
def test_a_folded_model_comes_back(name: str, tmp_path: Path) -> None:
    model, inputs = static_family(name)
    powernorm.fold(model, inputs)
    powernorm.save(model, tmp_path)
    assert {CONFIG, WEIGHTS} <= {file.name for file in tmp_path.iterdir()}
    fresh, _ = FAMILIES[name]()  # the original architecture, with LayerNorm
    loaded = powernorm.load(tmp_path, fresh)
    assert loaded is fresh
    assert not loaded.training
    assert torch.equal(run(loaded, inputs), run(model, inputs))
    tied = [[id(p) for _, p in m.named_parameters(remove_duplicate=False)] for m in (loaded, model)]
    assert [tied[0].index(one) for one in tied[0]] == [tied[1].index(one) for one in tied[1]]


def train_once(model: nn.Module, inputs: Inputs) -> Tensor:
    torch.manual_seed(1)
    output = run(model.train(), inputs)
    output.square().mean().backward()
    return output.detach()


SWAPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "rbn", {"momentum": 0.2}),
    "t5": ("t5", "bn", {"groups": 2}),
    "gpt2": ("gpt2", "pn", {"warmup_steps": 1}),
    "llama": ("llama", "pn-static", {}),
    "whisper": ("bart", "adanorm", {"k": 0.2}),
}
"""Family, norm and options by the name of a folder."""

LOADER = """
import sys
from pathlib import Path
import torch, powernorm
from surgery.foreign_models import run
from surgery.saving.test_saved_models import train_once

for folder in sorted(Path(sys.argv[1]).iterdir()):
    model = powernorm.load(folder / "model")
    inputs = torch.load(folder / "inputs.pt")
    with torch.no_grad():
        evaluated = run(model, inputs)
    trained = train_once(model, inputs)
    torch.save([evaluated, trained, model.state_dict()], folder / "found.pt")
"""


@pytest.fixture(scope="module")
def another_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models that were saved here and loaded in a new process."""
    transformers()
    root = tmp_path_factory.mktemp("saved")
    for name, (family, norm, options) in SWAPS.items():
        folder = root / name
        model, _ = FAMILIES[family]()
        inputs = PADDED[family](2)
        powernorm.swap(model, norm, where="*", **options)
        if name == "llama":
            powernorm.freeze_statistics(settle(model), "model.layers.0.*")
            model.to(torch.bfloat16).float()  # what the rotary embedding has been rounded to
        train_once(model, inputs)
        powernorm.save(model, folder / "model")
        torch.save(inputs, folder / "inputs.pt")
        with torch.no_grad():
            evaluated = run(model.eval(), inputs)
        torch.save([evaluated, train_once(model, inputs), model.state_dict()], folder / "there.pt")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADER, str(root)],
        check=True,
        cwd=Path(__file__).parents[2],
        capture_output=True,
    )
    return root


@pytest.mark.parametrize("name", SWAPS)
def test_another_process_gets_the_same_model(name: str, another_process: Path) -> None:
    """Bit for bit: evaluation, a training step with a padding mask, and the statistics after it."""
    folder = another_process / name
    (evaluated, trained, state), (found, again, other) = (
        torch.load(folder / file) for file in ("there.pt", "found.pt")
    )
    assert torch.equal(found, evaluated)
    assert torch.equal(again, trained)
    assert state.keys() == other.keys()
    assert [name for name in state if not torch.equal(state[name], other[name])] == []


def test_a_plain_from_pretrained_is_an_error_and_not_another_model(another_process: Path) -> None:
    hf = transformers()
    for build in (hf.AutoModel, hf.BertModel):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            build.from_pretrained(another_process / "bert" / "model")


def test_what_config_json_says(another_process: Path) -> None:
    config = json.loads((another_process / "bert" / "model" / CONFIG).read_text())
    assert config["architectures"] == ["BertModel"]
    record = config["powernorm"]
    assert (record["format"], record["version"]) == (1, powernorm.__version__)
    (part,) = record["modules"]
    assert (part["norm"], part["options"]) == ("rbn", {"momentum": 0.2})
    assert "encoder.layer.1.output.LayerNorm" in part["names"]
    assert set(part["names"]) == set(record["masks"][""])


@pytest.mark.parametrize("family", ["gpt2", "marian"])
def test_stock_names_with_the_key(family: str, tmp_path: Path) -> None:
    """`powernorm.load` finds the swaps in files of `save_pretrained` and the Trainer."""
    model, _ = FAMILIES[family]()
    inputs = PADDED[family](1)
    # The stack alone: the record's names are those below it.
    swapped = powernorm.swap(model.base_model, "bn")
    train_once(model, inputs)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = powernorm.load(tmp_path)
    assert torch.equal(run(loaded, inputs), run(model.eval(), inputs))
    swapped.undo()
    model.save_pretrained(tmp_path / "undone")
    refuses("it is not a model that powernorm has changed", powernorm.load, tmp_path / "undone")


def test_a_swapped_model_given_to_load_keeps_its_masks(tmp_path: Path) -> None:
    model, _ = FAMILIES["bert"]()
    inputs = PADDED["bert"](1)
    powernorm.swap(model, "bn")
    train_once(model, inputs)
    powernorm.save(model, tmp_path)
    given, _ = FAMILIES["bert"]()
    powernorm.swap(given, "rbn")
    powernorm.load(tmp_path, given)
    assert torch.equal(train_once(given, inputs), train_once(model, inputs))
    assert torch.equal(
        given.encoder.layer[0].output.LayerNorm.running_mean,
        model.encoder.layer[0].output.LayerNorm.running_mean,
    )


def test_shared_norms_and_types(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.LayerNorm(4)
            self.narrow = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.narrow(self.second(self.first(x)).to(torch.bfloat16))
            return y

    model = Twice()
    powernorm.swap(model, "bn")
    model(torch.randn(9, 4))
    powernorm.save(model, tmp_path)
    loaded = powernorm.load(tmp_path, Twice())
    assert loaded.first is loaded.second
    assert loaded.narrow[1].weight.dtype == torch.bfloat16
    assert loaded.narrow[1].running_mean.dtype == torch.float32
    x = torch.randn(3, 4)
    assert torch.equal(loaded(x), model.eval()(x))


def test_models_inside_wrappers_are_written(tmp_path: Path) -> None:
    model = folded_small()
    powernorm.save(torch.compile(model), tmp_path)
    assert torch.equal(powernorm.load(tmp_path, small())[1].weight, model[1].weight)


class Mine(nn.LayerNorm):
    def __init__(self, size: int, factor: float = 1.0, table: Any = None) -> None:
        super().__init__(size)
        self.factor, self.table = factor, table

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def test_norms_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    monkeypatch.setattr("powernorm.norms.registry.REGISTERED", {})
    powernorm.register_norm("mine", Mine)
    model = build()
    powernorm.swap(model, "mine", factor=3.0)
    powernorm.save(model, tmp_path / "named")
    x = torch.randn(2, 4)
    assert torch.equal(powernorm.load(tmp_path / "named", build())(x), model(x))
    monkeypatch.setattr("powernorm.norms.registry.REGISTERED", {})
    refuses("unknown norm 'mine'", powernorm.load, tmp_path / "named", build())

    class Nameless(powernorm.BatchNorm):
        pass

    with pytest.raises(InputError, match=r"^0: Nameless is your own norm and has no name"):
        powernorm.save(nn.Sequential(Nameless(4)), tmp_path / "nameless")
    assert not (tmp_path / "nameless").exists()


def test_a_file_makes_no_process_import_what_it_names(tmp_path: Path) -> None:
    """A folder from anywhere must not run code of a module that it names."""
    powernorm.save(small(), tmp_path)
    (tmp_path / "evil_module.py").write_text("raise SystemExit('it was imported')")
    edit_record(tmp_path, lambda record: record["modules"][0].update(norm="evil_module:Norm"))
    refuses("`import evil_module` first, if you trust it", powernorm.load, tmp_path, small())


def edit_record(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record in both files, as one who writes such files could."""
    from safetensors import safe_open

    from powernorm.checksums import save_sealed_tensors

    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["powernorm"])
    change(described["powernorm"])
    config = json.loads(described["config"]) | {"powernorm": described["powernorm"]}
    described["config"] = json.dumps(config)
    save_sealed_tensors(tensors, folder / WEIGHTS, {"powernorm": json.dumps(described)})
    (folder / CONFIG).write_text(described["config"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda record: record.update(format=9, version="3.1"), "install the powernorm '3.1'"),
        (lambda record: record.update(modules=[{"kind": "other", "names": ["0"]}]), "no module"),
        (lambda record: record.update(modules=5), "is not a list"),
        (lambda record: record["modules"][0].update(names=["7"]), "has no module '7'"),
        (lambda record: record["modules"][0].update(names=["1"]), "'1' is a Linear where"),
        (lambda record: record["modules"][0].update(options={"depth": 3}), "no option 'depth'"),
        (lambda record: record["modules"][0].update(num_features=5), r"\(4,\) there and \(5,\)"),
        # Of these nothing can be built.
        (
            lambda record: record["modules"][0].update(options={"device": "meta"}),
            "have one of device",
        ),
        (lambda record: record["modules"][0].update(num_features=10**15), "describes no module"),
        (
            lambda record: record["modules"][0].update(kind="multiply-add", num_features=-3),
            "describes no module",
        ),
    ],
)
def test_records_that_do_not_fit(
    change: Callable[[dict[str, Any]], object], match: str, tmp_path: Path
) -> None:
    powernorm.save(small(), tmp_path)
    edit_record(tmp_path, change)
    model = small()
    before = model[0]
    refuses(match, powernorm.load, tmp_path, model)
    assert model[0] is before


def test_another_architecture_is_refused_and_left_alone(tmp_path: Path) -> None:
    powernorm.save(folded_small(), tmp_path)
    for other, match in (
        (nn.Sequential(powernorm.BatchNorm(4), nn.Linear(4, 5, bias=False)), r"\(3, 4\) there"),
        (nn.Sequential(nn.Linear(4, 3)), "'0' is a Linear where"),
        (nn.Sequential(*small(), nn.Linear(3, 3)), r"it lacks 2\.bias"),
    ):
        before, modules = copy.deepcopy(other.state_dict()), list(other)
        refuses(match, powernorm.load, tmp_path, other)
        assert other.state_dict().keys() == before.keys()
        assert all(torch.equal(other.state_dict()[name], before[name]) for name in before)
        assert list(other) == modules


@pytest.mark.parametrize(("saved", "present"), [(2, 0), (0, 2)])
def test_a_count_of_nonfinite_batches_may_be_in_one_of_them_only(
    saved: int, present: int, tmp_path: Path
) -> None:
    def build(count: int) -> nn.Sequential:
        model = nn.Sequential(*small(), powernorm.PowerNorm(3))
        model[2].num_nonfinite_batches.fill_(count)
        return model

    powernorm.save(build(saved), tmp_path)
    assert int(powernorm.load(tmp_path, build(present))[2].num_nonfinite_batches) == saved


def test_an_edited_configuration_is_noticed(tmp_path: Path) -> None:
    powernorm.save(small(), tmp_path, config={"width": 4})
    assert json.loads((tmp_path / CONFIG).read_text())["width"] == 4
    written = json.loads((tmp_path / CONFIG).read_text())
    record = copy.deepcopy(written["powernorm"])
    record["modules"][0]["options"] = {"eps": 1e-2}
    # Weights that still fit may compute something else.
    for key, value in (("powernorm", record), ("width", 5)):
        (tmp_path / CONFIG).write_text(json.dumps(written | {key: value}))
        with pytest.raises(
            InputError, match=f"the key '{key}' differs: it was edited, or they are of two models"
        ):
            powernorm.load(tmp_path, small())
    (tmp_path / CONFIG).write_text("{")
    refuses("line 1: not JSON", powernorm.load, tmp_path, small())
    (tmp_path / CONFIG).unlink()
    refuses("cannot be read", powernorm.load, tmp_path, small())
    os.mkfifo(tmp_path / CONFIG)
    refuses("is not a regular file", powernorm.load, tmp_path, small())


def test_what_is_no_saved_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a folder: give one that powernorm\.save wrote"):
        powernorm.load(tmp_path / "nothing")
    (tmp_path / CONFIG).write_text("{}")
    refuses("it is not a model that powernorm has changed", powernorm.load, tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"something else")
    refuses(f"{WEIGHTS} is damaged", powernorm.load, tmp_path)
    powernorm.save(small(), tmp_path)
    refuses("does not describe a Hugging Face model", powernorm.load, tmp_path)


def damage(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 16
    (folder / WEIGHTS).write_bytes(content)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (damage, "is damaged, its contents do not match its checksum: save the model again with"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), f"{WEIGHTS} is damaged, .* save the"),
        (
            lambda folder: (folder / WEIGHTS).unlink(),
            f"holds no {WEIGHTS} and no model.safetensors",
        ),
        (lambda folder: (folder / CONFIG).unlink(), f"{CONFIG}: cannot be read .*; save the model"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"another model"),
            "holds model.safetensors, which other libraries would load instead of this model",
        ),
    ],
)
def test_a_file_that_is_damaged_missing_or_added_is_named(
    change: Callable[[Path], object], match: str, tmp_path: Path
) -> None:
    powernorm.save(small(), tmp_path)
    powernorm.load(tmp_path, small())
    change(tmp_path)
    model = small()
    before = copy.deepcopy(model.state_dict())
    refuses(match, powernorm.load, tmp_path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_models_of_transformers_are_built_by_name(tmp_path: Path) -> None:
    transformers()
    for name in ("Trainer", "os", "AutoModel"):
        powernorm.save(small(), tmp_path, config={"model_type": "bert", "architectures": [name]})
        refuses(f"'{name}' in .* is no model of transformers", powernorm.load, tmp_path)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no norm of powernorm"):
        powernorm.save(nn.Sequential(nn.LayerNorm(4)), tmp_path / "a")
    refuses("the model is itself a norm", powernorm.save, powernorm.BatchNorm(4), tmp_path / "a")
    refuses("on the meta device", powernorm.save, small().to("meta"), tmp_path / "a")
    with pytest.raises(InputError, match="config has to be JSON"):
        powernorm.save(small(), tmp_path / "a", config={"model": small()})
    refuses(r"expected a torch\.nn\.Module", powernorm.save, small().state_dict(), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    for blocked in (tmp_path / "file", tmp_path / "file" / "inside"):
        refuses(r"is a file|cannot be written", powernorm.save, small(), blocked)
    (tmp_path / "model.safetensors").write_text("")
    refuses("which other libraries would load instead", powernorm.save, small(), tmp_path)
    powernorm.save(small(), tmp_path / "b")
    refuses(r"call model\.to_empty", powernorm.load, tmp_path / "b", small().to("meta"))


class TestStock:
    """Checkpoints of the original architecture."""

    def test_layer_norms_of_this_library(self, tmp_path: Path) -> None:
        hf = transformers()
        for family, norm in (("bert", "ln"), ("gemma", "rms"), ("t5", "rms")):
            model, inputs = FAMILIES[family]()
            powernorm.swap(model, norm, where="*")
            powernorm.save(model, tmp_path / family, stock=True)
            kind = getattr(hf, type(model).__name__)
            loaded = kind.from_pretrained(tmp_path / family).eval()
            torch.testing.assert_close(run(loaded, inputs), run(model, inputs))
            assert "powernorm" not in json.loads((tmp_path / family / CONFIG).read_text())

    def test_batch_norms(self, tmp_path: Path) -> None:
        hf = transformers()
        config = hf.ResNetConfig(
            num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
            layer_type="basic",
        )  # fmt: skip
        model = hf.ResNetForImageClassification(config)
        x = torch.randn(4, 3, 32, 32)
        for _ in range(3):
            model(x)
        model.eval()
        expected = model(x).logits
        swapped = copy.deepcopy(model)
        powernorm.swap(swapped, "bn")
        powernorm.save(swapped, tmp_path / "swapped", stock=True)
        loaded = hf.ResNetForImageClassification.from_pretrained(tmp_path / "swapped")
        torch.testing.assert_close(loaded(x).logits, expected)
        powernorm.fold(model, x)  # into convolutions that get a bias
        with pytest.raises(InputError, match=r"no place for .*\.convolution\.bias"):
            powernorm.save(model, tmp_path / "folded", stock=True)

    def test_what_does_not_fit(self, tmp_path: Path) -> None:
        model, inputs = static_family("bert")
        with pytest.raises(InputError, match=r"embeddings\.LayerNorm is a BatchNorm, and the ori"):
            powernorm.save(model, tmp_path / "a", stock=True)
        powernorm.fold(model, inputs)
        with pytest.raises(InputError, match="which computes a statistic of each token"):
            powernorm.save(model, tmp_path / "a", stock=True)
        refuses("is no model of transformers", powernorm.save, small(), tmp_path / "a", stock=True)
        model, _ = FAMILIES["bert"]()
        powernorm.swap(model, "ln", eps=1e-3)
        with pytest.raises(InputError, match=r"whose eps is 1e-12, not 0\.001"):
            powernorm.save(model, tmp_path / "a", stock=True)
        assert not (tmp_path / "a").exists()
