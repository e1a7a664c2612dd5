"""Models without norms as folders that transformers alone loads: norms with a very large eps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from powernorm.inspection.batches import call_model
from powernorm.integrations.stock_models import compare_stock
from powernorm.surgery.removal import MethodName, build_removal
from powernorm.surgery.removal.layers import FrozenDeviationNorm
from powernorm.surgery.saving.stock import CONSTANT_EPS, constant_eps, stock_state
from refusals import refuses

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        eos_token_id=0,
        bos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    config = transformers.BertConfig(**SMALL, intermediate_size=32, max_position_embeddings=16)
    return transformers.BertForMaskedLM(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=1, max_position_embeddings=16
    )
    return transformers.LlamaForCausalLM(config)


def gemma() -> Any:
    """Its weight is γ - 1."""
    config = transformers.GemmaConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=1, head_dim=8, max_position_embeddings=16
    )
    return transformers.GemmaForCausalLM(config)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(50, (4, 12), generator=generator)} for _ in range(3)]


def without_norms(
    build: Callable[[], Any], method: MethodName, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A model with norms of its own whose places layers of a removal have taken."""
    torch.manual_seed(0)
    original = build().eval().to(dtype)
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(float("weight" in name), 0.3)
    removal = build_removal(method, copy.deepcopy(original), 30)
    removal.install()
    removal.fit(original, batches(), call_model)
    if method == "taper":  # its scales are taken from the training
        for step in range(12):
            removal.model.train()(**batches()[step % 3]).logits.sum().backward()
    removal.settle()
    return removal.model.eval()


@pytest.mark.parametrize(
    ("build", "method"),
    [
        (gpt2, "match-centered"),
        (gpt2, "taper"),
        (bert, "match-centered"),  # post-norm, where what centers does not fold
        (bert, "freeze"),
        (llama, "freeze"),
        (gemma, "taper"),
    ],
)
def test_own_class_gives_the_outputs(
    build: Callable[[], Any], method: MethodName, tmp_path: Path
) -> None:
    model = without_norms(build, method)
    powernorm.save(model, tmp_path, stock=True)
    described = json.loads((tmp_path / "config.json").read_text())
    assert "powernorm" not in described
    assert [value for key, value in described.items() if key.endswith(("eps", "epsilon"))] == [
        CONSTANT_EPS
    ]
    auto = "AutoModelForMaskedLM" if build is bert else "AutoModelForCausalLM"
    loaded = getattr(transformers, auto).from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    norms = [m for m in loaded.modules() if "Norm" in type(m).__name__]
    assert norms
    assert not any(isinstance(module, powernorm.Norm) for module in loaded.modules())
    with torch.no_grad():
        for batch in batches():
            torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)
    wide, narrow = compare_stock(model, tmp_path, batches()[0])
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    assert wide.relative < 1e-6  # a √E is rounded to float32, and that is all
    assert narrow.relative < 1e-6


@pytest.mark.parametrize("build", [gpt2, bert])
def test_weights_in_float64_leave_no_error(build: Callable[[], Any], tmp_path: Path) -> None:
    model = without_norms(build, "freeze", torch.float64)
    powernorm.save(model, tmp_path, stock=True)
    assert compare_stock(model, tmp_path, batches()[0])[0].relative < 1e-14


def test_layer_norm_with_that_eps_is_the_constant_bit_by_bit() -> None:
    """Up to a deviation of 2¹⁸ in float32: the power of two is all that it multiplies by."""
    weight = torch.rand(64) + 0.5
    for scale in (1e-3, 1.0, 2.0**17):
        x = scale * torch.randn(100, 64)
        x -= x.mean(-1, keepdim=True)
        norm = nn.LayerNorm(64, eps=CONSTANT_EPS)
        rms = nn.RMSNorm(64, eps=CONSTANT_EPS)
        with torch.no_grad():
            norm.weight.copy_(weight * CONSTANT_EPS**0.5)
            rms.weight.copy_(norm.weight)
        assert torch.equal(rms(x), weight * x)
        torch.testing.assert_close(norm(x), weight * x, rtol=0, atol=1e-6 * scale)


def test_bfloat16_holds_it(tmp_path: Path) -> None:
    model = without_norms(gpt2, "freeze", torch.bfloat16)
    powernorm.save(model, tmp_path, stock=True)
    assert compare_stock(model, tmp_path, batches()[0])[-1].dtype is torch.bfloat16


def root_of(folder: Path) -> float:
    """The square root of the eps in a saved configuration."""
    described = json.loads((folder / "config.json").read_text())
    (eps,) = (value for key, value in described.items() if key.endswith(("eps", "epsilon")))
    return float(eps**0.5)


@pytest.mark.parametrize(
    ("build", "method"),
    [(gpt2, "match-centered"), (bert, "freeze"), (llama, "freeze"), (gemma, "taper")],
)
def test_float16_has_the_largest_eps_that_its_slopes_allow(
    build: Callable[[], Any], method: MethodName, tmp_path: Path
) -> None:
    model = without_norms(build, method).half()
    powernorm.save(model, tmp_path, stock=True)
    largest = max(norm.affine()[0].detach().max() for norm in model.modules() if is_ours(norm))
    assert 2**15 < largest * root_of(tmp_path) < 2**16
    wide, *_, own = compare_stock(model, tmp_path, batches()[0])
    assert own.dtype is torch.float16
    # γ and a √E, which is a power of two times a, are rounded to float16.
    assert max(wide.relative, own.relative) < 3e-3


def test_float16_says_which_eps_it_would_need(tmp_path: Path) -> None:
    """Its slopes allow too small a one for the largest deviation."""
    model = without_norms(gpt2, "freeze").half()
    layers = [norm for norm in model.modules() if isinstance(norm, FrozenDeviationNorm)]
    layers[0].deviation.fill_(1e-3)
    layers[1].deviation.fill_(1e3)
    with pytest.raises(InputError, match=r"root is 3\.2e\+04 or more, 32 times .* convert the mod"):
        powernorm.save(model, tmp_path / "a", stock=True)
    assert not (tmp_path / "a").exists()


def is_ours(module: nn.Module) -> TypeGuard[powernorm.Norm]:
    return isinstance(module, powernorm.Norm)


@settings(max_examples=30)
@given(
    exponent=st.floats(-18, 18),
    spread=st.floats(0, 6),
    num_features=st.sampled_from((1, 2, 7, 16, 33)),
    center=st.booleans(),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
)
def test_norm_in_place_of_another_computes_the_same_or_is_refused(
    exponent: float, spread: float, num_features: int, center: bool, dtype: torch.dtype
) -> None:
    """One norm whose tokens deviate by 2^exponent, with slopes over `spread` powers of two."""
    generator = torch.Generator().manual_seed(0)
    ours = FrozenDeviationNorm(num_features, center=center)
    with torch.no_grad():
        ours.weight.copy_(2 ** (spread * (torch.rand(num_features, generator=generator) - 0.5)))
    model = nn.Sequential(ours).to(dtype).eval()
    ours.freeze(2.0**exponent)
    original = nn.Sequential(nn.LayerNorm(num_features) if center else nn.RMSNorm(num_features))
    try:
        eps = constant_eps(model, original)
    except InputError:
        steepest = float(ours.affine()[0].detach().max())
        assert dtype is torch.float16
        assert 32 * 2.0**exponent * steepest > 2**14 or steepest > 2**15
        return
    stock = copy.deepcopy(original).to(dtype)
    stock[0].eps = eps
    stock.load_state_dict(stock_state(model, stock, original))
    limits = torch.finfo(dtype)
    tokens = 2.0**exponent * torch.randn(64, num_features, generator=generator)
    x = tokens.clamp(limits.min, limits.max).to(dtype).double()
    with torch.no_grad():
        wanted, found = model.double()(x), stock.double()(x)
    smallest = limits.tiny * limits.eps  # below it there is nothing
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=smallest)
    assert error < 8 * limits.eps


@pytest.mark.parametrize(
    ("build", "method", "words"),
    [
        (gpt2, "match", "subtracts the mean of each token as this layer does not: one that center"),
        (bert, "match", "subtracts the mean of each token as this layer does not: one that center"),
        (llama, "match", "has no bias for the shift of this layer: one without a shift fits"),
    ],
)
def test_method_that_the_class_cannot_hold_is_named(
    build: Callable[[], Any], method: MethodName, words: str, tmp_path: Path
) -> None:
    refuses(words, powernorm.save, without_norms(build, method), tmp_path / "a", stock=True)
    assert not (tmp_path / "a").exists()


def test_one_eps_is_for_all_norms(tmp_path: Path) -> None:
    """A norm that still normalizes would divide by the constant of the others."""
    model = without_norms(gpt2, "freeze")
    model.transformer.ln_f = nn.LayerNorm(16)  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"transformer\.ln_f is still a LayerNorm, and transf"):
        powernorm.save(model, tmp_path / "a", stock=True)


def test_class_whose_eps_is_not_in_its_configuration(tmp_path: Path) -> None:
    config = transformers.OPTConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32,
        max_position_embeddings=16, word_embed_proj_dim=16,
    )  # fmt: skip
    model = without_norms(lambda: transformers.OPTForCausalLM(config), "freeze")
    with pytest.raises(InputError, match=r"does not set the eps of model\.decoder"):
        powernorm.save(model, tmp_path / "a", stock=True)


def test_weights_that_are_not_what_was_saved_are_refused(tmp_path: Path) -> None:
    model = without_norms(gpt2, "freeze")
    powernorm.save(model, tmp_path, stock=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # type: ignore[union-attr, operator]
    refuses("differs from the saved one", compare_stock, model, tmp_path, batches()[0])
