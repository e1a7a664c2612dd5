"""Saving of biases and untied tensors that a fold makes where it leaves no module."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import powernorm
from powernorm.errors import InputError
from refusals import refuses


def _opt() -> nn.Module:
    """As OPT-350m, whose last projection has no bias."""
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OPTConfig(
        **sizes,
        vocab_size=60,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        do_layer_norm_before=False,
    )
    return transformers.OPTForCausalLM(config)


def _bloom() -> nn.Module:
    config = transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


def _trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "bias" in name:
            parameter.data.normal_(0, 0.1)
    return model.eval()


FOLDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a bias": (_opt, {"centering": "weights"}),
    "an untied head": (_bloom, {"tied": "untie"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDS)
def test_what_a_fold_makes_is_saved(name: str, tmp_path: Path) -> None:
    build, options = FOLDS[name]
    model = _trained(build())
    ids = torch.randint(6, 60, (2, 9))
    before = model(ids).logits.detach()
    report = powernorm.fold(model, ids, keep="statistics", **options)
    structure = report.plan.folding.structure
    assert (bool(structure.biases), bool(structure.untied)) == (name == "a bias", name != "a bias")
    assert not structure.norms
    assert "save it by powernorm.save" in str(report)
    powernorm.save(deepcopy(model), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        for again in (
            powernorm.load(tmp_path / folder),
            powernorm.load(tmp_path / folder, build()),
        ):
            torch.testing.assert_close(again(ids).logits, before, atol=1e-6, rtol=1e-5)
            powernorm.save(again, tmp_path / "again")
            loaded = powernorm.load(tmp_path / "again")
            assert torch.equal(loaded(ids).logits, again(ids).logits)
    refuses(r"leave out stock=True", powernorm.save, model, tmp_path / "stock", stock=True)
    report.undo()
    refuses("as you save any other model", powernorm.save, model, tmp_path / "undone")


def test_a_fold_that_any_library_saves_says_so(tmp_path: Path) -> None:
    model = _trained(_bloom())
    ids = torch.randint(6, 60, (2, 9))
    before = model(ids).logits.detach()
    report = powernorm.fold(model, ids, keep="statistics")
    assert "save it as you save any other model" in str(report)
    model.save_pretrained(tmp_path)
    again = transformers.BloomForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids).logits, before, atol=1e-6, rtol=1e-5)


def test_a_fold_that_fails_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise InputError("the folded model fails")

    model, ids = _trained(_opt()), torch.randint(6, 60, (2, 9))
    before = model.config.to_dict()
    plan = powernorm.plan_fold(model, ids, keep="statistics", centering="weights")
    monkeypatch.setattr("powernorm.surgery.folding.api.run_folded", fail)
    refuses("the folded model fails", plan.apply, verify=False)
    assert model.config.to_dict() == before


def test_a_bias_in_a_part_of_an_own_model(tmp_path: Path) -> None:
    def build() -> nn.Module:
        part = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))
        return nn.Sequential(part, nn.Tanh())

    model = _trained(build())
    nn.init.normal_(model[0][1].bias)
    ids = torch.arange(9)
    before = model(ids).detach()
    report = powernorm.fold(model[0], ids, keep="statistics", centering="weights")
    assert report.plan.folding.structure.biases == {"2.bias": 4}
    powernorm.save(model, tmp_path)
    torch.testing.assert_close(powernorm.load(tmp_path, build())(ids), before)


def test_saved_bytes_are_equal_from_call_to_call(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), powernorm.BatchNorm(8), nn.Linear(8, 2))
    for attempt in range(6):
        powernorm.save(model, tmp_path / str(attempt), config={"é\n": "ü€\x7f\x1f\\"})
    files = [
        [file.read_bytes() for file in sorted((tmp_path / str(attempt)).iterdir())]
        for attempt in range(6)
    ]
    assert all(one == files[0] for one in files)


def check_half_precision(
    folder: Path,
    exponents: tuple[float, float],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """Fold with powers of two of the deviation and of γ; odd sizes, and one of 1."""
    features, outputs, length = sizes

    def build() -> nn.Module:
        norm = powernorm.BatchNorm(features)
        return nn.Sequential(norm, nn.Linear(features, outputs)).to(dtype).eval()

    torch.manual_seed(0)
    deviation, scale = (2.0**exponent for exponent in exponents)
    model: Any = build()
    with torch.no_grad():
        model[0].num_batches_tracked.fill_(1)
        model[0].running_var.uniform_(0.5, 2).mul_(deviation**2)
        model[0].running_mean.normal_().mul_(deviation)
        model[0].weight.uniform_(0.5, 2).mul_(scale)
    x = (deviation * torch.randn(3, length, features)).to(dtype)
    before = model.double()(x.double()).detach()
    model = model.to(dtype)
    try:
        folded = powernorm.fold(model, x, verify=False).model
    except InputError:
        assert dtype is torch.float16
        assert scale / deviation > 2**10
        return
    weight, bias = (float(p.detach().abs().max()) for p in folded.parameters())
    largest = weight * deviation + bias
    limits = torch.finfo(dtype)
    error = (folded.double()(x.double()) - before).abs().max()
    assert error <= 4 * limits.eps * features * (largest + deviation * limits.tiny)
    powernorm.save(folded.to(dtype), folder)
    again = powernorm.load(folder, build())
    assert torch.equal(again(x), folded(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("exponents", "sizes"),
    [
        ((0.3, -0.7), (5, 3, 4)),
        ((-9.5, 7.5), (3, 9, 1)),
        ((9.5, -7.5), (1, 1, 5)),
        ((-4.0, -8.0), (9, 2, 2)),
        ((10.0, 8.0), (7, 6, 3)),
    ],
)
def test_folded_in_half_precision_it_computes_the_same_or_is_refused(
    tmp_path: Path,
    exponents: tuple[float, float],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    check_half_precision(tmp_path, exponents, sizes, dtype)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    exponents=st.tuples(st.floats(-10, 10), st.floats(-8, 8)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
)
def test_folded_in_half_precision_at_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    exponents: tuple[float, float],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    check_half_precision(tmp_path_factory.mktemp("half"), exponents, sizes, dtype)
