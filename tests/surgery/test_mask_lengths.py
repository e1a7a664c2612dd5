"""Masks of models that change the number of positions between their mask and their norms."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from covering import some_default
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.feature_dims import features_last
from powernorm.norms.masks import current_padding_mask
from powernorm.surgery.swapping import swap
from refusals import refuses
from surgery.foreign_models import PAD, WIDTH, transformers
from surgery.models_of_other_lengths import BASE, CASES, Case, attention_mask, text

# torch's own, of how WavLM calls its attention.
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")

# Their own convolutions, or attention at random places, let the last positions see padding.
LEAKS = ("data2vec",)
# One of each rule; the others are alike.
DEFAULTS = tuple(name for name in CASES if name not in ("hubert", "wavlm", "unispeech", "data2vec"))


def swapped(case: Case) -> nn.Module:
    hf = transformers()
    hf.logging.set_verbosity_error()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = case.build(hf)
    swap(model, "bn", where="*", momentum=1.0)
    return model.train()


def norms_of(model: nn.Module) -> dict[str, BatchStatisticsNorm]:
    modules = model.named_modules()
    return {name: norm for name, norm in modules if isinstance(norm, BatchStatisticsNorm)}


def ran(model: nn.Module, inputs: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Input and mask of each norm of a call."""
    seen: dict[str, tuple[Tensor, Tensor | None]] = {}
    handles = []
    for name, norm in norms_of(model).items():

        def note(norm: nn.Module, args: tuple[Tensor], name: str = name) -> None:
            x = features_last(args[0].detach().clone(), norm.feature_dim)
            seen[name] = x, current_padding_mask(x, norm)

        handles.append(norm.register_forward_pre_hook(note))
    torch.manual_seed(0)
    model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", some_default(list(CASES), *DEFAULTS))
def test_norms_of_another_length_leave_out_padding(name: str) -> None:
    case = CASES[name]
    model = swapped(case)
    size = max(case.lengths) + case.extra
    twin = copy.deepcopy(model)
    seen = ran(model, case.inputs(case.lengths, size))
    for norm_name, norm in norms_of(model).items():
        x, mask = seen[norm_name]
        assert mask is not None, norm_name
        assert mask.any() or norm_name in case.not_tokens, norm_name
        assert not mask.all(dim=1).any(), norm_name
        assert torch.allclose(norm.running_mean, x[~mask].mean(0), atol=1e-5), norm_name
    if name in LEAKS:
        return
    ran(twin, case.inputs(case.lengths, size + case.extra))
    for norm_name, norm in norms_of(model).items():
        other = norms_of(twin)[norm_name]
        assert torch.allclose(norm.running_mean, other.running_mean, atol=1e-3), norm_name
        assert torch.allclose(norm.running_var, other.running_var, atol=1e-3), norm_name


def test_a_pickled_model_derives_its_masks() -> None:
    case = CASES["longformer"]
    twin = pickle.loads(pickle.dumps(swapped(case)))
    seen = ran(twin, case.inputs((13, 6), 13))
    expected = attention_mask((13, 6), 16) == 0
    assert all(torch.equal(mask, expected) for _, mask in seen.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_derived_masks_compile_without_a_break() -> None:
    torch._dynamo.reset()
    case = CASES["decision"]
    model = swapped(case)
    twin = copy.deepcopy(model)
    inputs = case.inputs((6, 3), 6)
    ran(twin, inputs)
    torch.manual_seed(0)
    torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    for norm, other in zip(norms_of(model).values(), norms_of(twin).values(), strict=True):
        assert torch.allclose(norm.running_mean, other.running_mean, atol=1e-5)


def test_patches_as_many_as_tokens_are_no_padding() -> None:
    case = CASES["layoutlmv3"]
    model = swapped(case)
    seen = ran(model, case.inputs((5, 3), 5))
    assert not seen["norm"][1].any()
    assert torch.equal(seen["embeddings.LayerNorm"][1], attention_mask((5, 3), 5) == 0)


def test_a_model_that_computes_again_in_the_backward_is_refused() -> None:
    hf = transformers()
    config = hf.ReformerConfig(
        **{**BASE, "attention_head_size": 4, "feed_forward_size": 16}, axial_pos_embds=False,
        attn_layers=["local"], local_attn_chunk_length=4, is_decoder=False,
    )  # fmt: skip
    model = hf.ReformerModel(config).train()
    swap(model, "bn")
    model(**text((8, 8), 8))
    refuses(r"ReformerModel.*again in the backward.*where=", model, **text((8, 5), 8))
    model.eval()
    model(**text((8, 5), 8))


class Prompted(nn.Module):
    """Puts a vector in front of its input, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        del padding_mask
        return self.norm(torch.cat([x[:, :1], x], dim=1))


def test_a_length_of_no_known_kind_is_one_error_that_says_what_to_do() -> None:
    model = Prompted().train()
    swap(model, "bn")
    words = r"norm .*Prompted.*\(2, 9, 8\).*padding_mask of Prompted.*\(2, 8\).*where="
    refuses(words, model, torch.randn(2, 8, WIDTH), attention_mask((8, 5), 8) == 0)
    assert current_padding_mask() is None


def test_heads_of_stablelm_are_left_alone() -> None:
    hf = transformers()
    config = hf.StableLmConfig(
        vocab_size=40, pad_token_id=PAD, hidden_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, intermediate_size=16, qk_layernorm=True,
    )  # fmt: skip
    rows = {row.name: row for row in powernorm.plan_swap(hf.StableLmModel(config)).rows}
    for name in ("q_layernorm.norms.0", "q_layernorm.norms.1", "k_layernorm.norms.1"):
        assert rows[f"layers.0.self_attn.{name}"].action == "keep"
        assert "queries, keys or values" in rows[f"layers.0.self_attn.{name}"].reason
    assert rows["layers.0.input_layernorm"].action == "swap"
