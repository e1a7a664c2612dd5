"""Models of other libraries that stayed, or went wrong, and fold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.norms import Norm
from surgery.foreign_models import output_of, run, seeded, transformers
from surgery.static_models import left_of, settle

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

VOCABULARY = 40
TINY = {"vocab_size": VOCABULARY, "pad_token_id": 1}
IDS = torch.arange(12).reshape(2, 6) + 5


def settled(build: Callable[[], nn.Module], to: str = "bn") -> nn.Module:
    """A model in float64 with static norms in place of its own, BatchNorms with statistics."""
    model = seeded(build).double()
    if to:
        powernorm.swap(model, to=to, where="*")
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        if hasattr(module, "running_var") and not isinstance(module, Norm):
            # Of frozen norms these are all buffers.
            for name in ("weight", "bias", "running_mean", "running_var"):
                drawn = torch.rand(getattr(module, name).shape, generator=generator) + 0.5
                getattr(module, name).data.copy_(drawn)
    return settle(model)


def folded(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
    expected = run(model, inputs)
    report = powernorm.fold(model, inputs, **options)
    gap = (run(model, inputs) - expected).abs().max() / expected.abs().max()
    assert gap <= 1e-12
    return report


def static_rows(report: Any) -> list[str]:
    """Return what remains of the static norms."""
    return [left_of(row) for row in report.rows if "in evaluation" not in row.reason]


def xlnet() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers().XLNetConfig(
        vocab_size=VOCABULARY, d_model=8, n_layer=2, n_head=2, d_inner=16, dropout=0.0
    )
    build = transformers().XLNetModel
    return settled(lambda: build(config)), {"input_ids": IDS, "use_mems": False}


def falcon(bias: bool) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers().FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        bias=bias,
        new_decoder_architecture=True,
    )
    build = transformers().FalconForCausalLM
    return settled(lambda: build(config)), {"input_ids": IDS, "use_cache": False}


def swin() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers().SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2
    )
    build = transformers().SwinForImageClassification
    return settled(lambda: build(config)), {"pixel_values": images(16)}


def squeezebert() -> tuple[nn.Module, dict[str, Any]]:
    groups = dict.fromkeys(
        ("q_groups", "k_groups", "v_groups", "intermediate_groups", "output_groups"), 2
    )
    config = transformers().SqueezeBertConfig(
        **TINY,
        **groups,
        hidden_size=8,
        embedding_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    build = transformers().SqueezeBertModel
    return settled(lambda: build(config)), {"input_ids": IDS}


def mobilenet() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers().MobileNetV2Config(image_size=32, depth_multiplier=0.35)
    build = transformers().MobileNetV2ForImageClassification
    return settled(lambda: build(config), to=""), {"pixel_values": images(32)}


def conformer() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers().Wav2Vec2ConformerConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(2, 2),
        conv_kernel=(3, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    build = transformers().Wav2Vec2ConformerModel
    waves = torch.randn(2, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return settled(lambda: build(config), to=""), {"input_values": waves}


def detr() -> tuple[nn.Module, dict[str, Any]]:
    backbone = transformers().ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, out_features=["stage4"]
    )
    config = transformers().DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=4,
    )
    build = transformers().DetrModel
    return settled(lambda: build(config), to=""), {"pixel_values": images(64)[:1]}


def images(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)


FOLDING = {
    "xlnet": (xlnet, 4),
    "falcon": (lambda: falcon(False), 5),
    "falcon with biases": (lambda: falcon(True), 5),
    "swin": (swin, 11),
    "squeezebert": (squeezebert, 5),
    "mobilenet": (mobilenet, 52),
    "conformer": (conformer, 2),
    "detr": (detr, 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some_default(FOLDING, "falcon", "xlnet", "conformer"))
def test_folds_wholly(name: str) -> None:
    build, count = FOLDING[name]
    model, inputs = build()
    left = static_rows(folded(model, inputs))
    # XLNet's stream begins with an embedding and ends as the output; all others go into weights.
    assert left == ["fold"] * count


@pytest.mark.slow
def test_images_of_other_sizes_that_swin_pads() -> None:
    model, inputs = swin()
    other = {"pixel_values": images(20)}  # 10 patches, then 5: no multiple of the window
    expected = run(model, other)
    powernorm.fold(model, inputs)
    assert (run(model, other) - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("verify", some_default([True, False], True))
def test_mamba_reads_the_type_of_its_norms(verify: bool) -> None:
    config = transformers().MambaConfig(
        vocab_size=VOCABULARY, hidden_size=8, state_size=4, num_hidden_layers=2
    )
    model = settled(lambda: transformers().MambaForCausalLM(config))
    report = folded(model, {"input_ids": IDS, "use_cache": False}, verify=verify)
    assert [row.action for row in report.rows] == ["keep", "keep", "fold"]
    assert "another module reads its attribute 'weight'" in report.rows[0].reason


# Embedding and head in one tensor, where a forward asks whether they are.

T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1}
GEMMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def switch() -> nn.Module:
    config = transformers().SwitchTransformersConfig(
        **T5, num_heads=2, decoder_start_token_id=0, tie_word_embeddings=True
    )
    config.encoder_sparse_step = config.decoder_sparse_step = (
        0  # no experts, which cannot be traced
    )
    return transformers().SwitchTransformersForConditionalGeneration(config)


def umt5() -> nn.Module:
    config = transformers().UMT5Config(
        **T5, num_heads=2, decoder_start_token_id=0, tie_word_embeddings=True
    )
    return transformers().UMT5ForConditionalGeneration(config)


def t5gemma() -> nn.Module:
    config = transformers().T5GemmaConfig(
        encoder=dict(GEMMA), decoder=dict(GEMMA), vocab_size=VOCABULARY, tie_word_embeddings=True
    )
    return transformers().T5GemmaForConditionalGeneration(config)


@pytest.mark.parametrize("build", some_default([umt5, switch, t5gemma], umt5))
def test_untied_models_stay_so_and_keep_their_configuration(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = settled(build)
    target = IDS[:, :4]
    inputs = {
        "input_ids": IDS,
        "attention_mask": torch.ones_like(IDS),
        "decoder_input_ids": target,
        "decoder_attention_mask": torch.ones_like(target),
        "use_cache": False,
    }
    expected = run(model, inputs)
    before, parameters = (
        model.config.to_dict(),
        dict(model.named_parameters(remove_duplicate=False)),
    )
    ties = dict(model.all_tied_weights_keys)
    head = next(name for name in ties if "head" in name)
    report = folded(model, inputs)
    assert static_rows(report) == ["fold"] * len(report.rows)
    assert head in report.plan.folding.structure.untied
    # The record of the fold is all that is new.
    assert {**model.config.to_dict(), "powernorm": before["powernorm"]} == before
    model.tie_weights()
    torch.testing.assert_close(run(model, inputs), expected, rtol=1e-12, atol=1e-12)
    assert head not in model.all_tied_weights_keys
    model.save_pretrained(tmp_path)  # both tensors are written, and nothing is called shared
    report.undo()
    assert model.all_tied_weights_keys == ties
    now = dict(model.named_parameters(remove_duplicate=False))
    assert all(now[name] is parameter for name, parameter in parameters.items())
    model.tie_weights()
    assert model.get_parameter(head) is model.get_parameter(ties[head])
    assert torch.equal(run(model, inputs), expected)


# PEFT


def bert() -> nn.Module:
    config = transformers().BertConfig(
        **TINY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    return transformers().BertModel(config)


def adapted(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], **options)
    model = peft.get_peft_model(settled(bert), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(2))
    return model.eval().double()


@pytest.mark.parametrize(
    "options", some_default([{}, {"use_dora": True}, {"lora_bias": True}], {"use_dora": True})
)
def test_adapters_merge_and_switch_off_after_a_fold(options: dict[str, Any]) -> None:
    model, inputs = adapted(**options), {"input_ids": IDS}
    expected = run(model, inputs)
    with model.disable_adapter():
        without = run(model, inputs)
    assert (without - expected).abs().max() > 1e-3
    rows = {row.name.rpartition("encoder.")[2]: row for row in folded(model, inputs).rows}
    beside = rows["layer.0.output.LayerNorm"]
    assert left_of(beside) == "multiply-add"
    assert "'base_model.model.encoder.layer.1.attention.self.query' is an adapter" in beside.reason
    assert "model.merge_and_unload()" in beside.reason
    assert left_of(rows["layer.0.attention.output.LayerNorm"]) == "fold"
    with model.disable_adapter():
        torch.testing.assert_close(run(model, inputs), without, rtol=1e-6, atol=1e-6)
    merged = model.merge_and_unload()
    torch.testing.assert_close(run(merged, inputs), expected, rtol=1e-6, atol=1e-6)


def test_merged_first_all_norms_fold() -> None:
    model = adapted().merge_and_unload()
    report = folded(model, {"input_ids": IDS})
    assert static_rows(report) == ["fold"] * 5


def test_a_norm_that_peft_has_copied_stays() -> None:
    """The copy is used, the original comes back when the adapter is off."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(
        nn.Linear(4, 6), powernorm.BatchNorm(6), nn.Linear(6, 6), powernorm.BatchNorm(6)
    ).double()
    model.append(nn.Linear(6, 2).double())
    settle(model)
    config = peft.LoraConfig(r=2, target_modules=["2"], modules_to_save=["3"])
    wrapped = peft.get_peft_model(model, config).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = wrapped(x).detach()
    report = powernorm.fold(wrapped, x)
    assert not any(row.action == "fold" and ".3." in row.name for row in report.rows)
    torch.testing.assert_close(wrapped(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wrapped.merge_and_unload()(x), expected, rtol=1e-6, atol=1e-6)


# sentence-transformers


def sentence_model(folder: Path) -> Any:
    sentences = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    transformers().BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    seeded(bert).save_pretrained(folder)
    parts = [modules.Transformer(str(folder)), modules.Pooling(8), modules.Dense(8, 8)]
    return sentences.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")


@pytest.mark.slow
def test_sentence_transformers(tmp_path: Path) -> None:
    model = sentence_model(tmp_path).double()
    powernorm.swap(model, to="bn", where="*")
    settle(model)
    texts, others = ["a b c", "d a"], ["h g f e d c b a", "c", "b a"]
    inputs = model.preprocess(texts)
    expected = [torch.tensor(model.encode(one)) for one in (texts, others)]
    report = powernorm.fold(model, inputs)
    assert static_rows(report) == ["fold"] * 5
    assert report.errors[0].relative <= 1e-12
    for one, before in zip((texts, others), expected, strict=True):
        found = torch.tensor(model.encode(one))
        torch.testing.assert_close(found, before, rtol=1e-6, atol=1e-6)


def test_a_norm_in_front_of_their_pooling_and_dense(tmp_path: Path) -> None:
    """It folds across the pooling, whose masked mean was expanded to the features."""
    whole = sentence_model(tmp_path).double()
    features = {
        "token_embeddings": torch.randn(2, 5, 8, dtype=torch.float64),
        "attention_mask": (torch.arange(5) < torch.tensor([[5], [3]])).long(),
    }

    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = powernorm.BatchNorm(8, dtype=torch.float64)
            self.pooling, self.dense = whole[1], whole[2]

        def forward(self, token_embeddings: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.norm(torch.tanh(token_embeddings))
            pooled = self.pooling({"token_embeddings": x, "attention_mask": attention_mask})
            found = self.dense({"sentence_embedding": pooled["sentence_embedding"]})
            return found["sentence_embedding"]

    tail = settle(Tail())
    with torch.no_grad():  # in front of a mask a scale alone can pass
        tail.norm.running_mean.zero_()
        tail.norm.bias.zero_()
    assert static_rows(folded(tail, features)) == ["fold"]


def test_what_a_tokenizer_returns_is_taken(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abc"]))
    tokenizer = transformers().BertTokenizer(str(tmp_path / "vocab.txt"))
    batch = tokenizer(["a b c", "b"], padding=True, return_tensors="pt")
    model = settled(bert)
    expected = output_of(model(**batch)).detach()
    report = powernorm.fold(model, batch)
    assert static_rows(report) == ["fold"] * 5
    torch.testing.assert_close(output_of(model(**batch)).detach(), expected, rtol=1e-12, atol=1e-12)
