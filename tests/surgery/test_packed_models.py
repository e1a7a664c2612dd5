"""Swapped Hugging Face models on sequences packed into one row, without padding.

Whatever says where the sequences begin, each token counts, and nothing warns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.inspection.observer import observe

transformers = pytest.importorskip("transformers")

LENGTHS = (5, 2, 7)
TOTAL = sum(LENGTHS)
SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL_GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
GPT2_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def build(family: str, attention: str, norm: str) -> nn.Module:
    torch.manual_seed(0)
    how = {"attn_implementation": attention}
    if family == "gpt2":
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.GPT2Config(**SMALL_GPT2, **GPT2_DROPOUT, **tokens, **how)
        model = transformers.GPT2Model(config)
    elif family == "bert":
        model = transformers.BertModel(transformers.BertConfig(**SMALL, **NO_DROPOUT, **how))
    else:
        name = {"llama": "Llama", "qwen2": "Qwen2"}[family]
        config = getattr(transformers, f"{name}Config")(**SMALL, num_key_value_heads=1, **how)
        model = getattr(transformers, f"{name}Model")(config)
    powernorm.swap(model, norm, **({"warmup_steps": 1} if norm == "pn" else {}))
    return model.double().train()


def flat(attention: str, causal: bool, kind: str) -> dict[str, Any]:
    """Return the arguments that show where the sequences begin, besides the tokens."""
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.cat([torch.arange(length) for length in LENGTHS])
    given: dict[str, Any] = {"position_ids": position[None]}
    if causal:  # transformers tells sequences apart only where there is no cache
        given |= {"use_cache": False}
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0, dtype=torch.int32)
    allowed = segment[:, None] == segment
    if causal:
        allowed &= torch.arange(TOTAL)[:, None] >= torch.arange(TOTAL)
    if kind == "cu_seq_lens":
        longest = max(LENGTHS)
        given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        given |= {"max_length_q": longest, "max_length_k": longest}
    elif kind == "seq_idx":
        given |= {"seq_idx": segment[None].int()}
    elif kind == "block mask":
        # As each implementation takes it: what may be seen, or what is added to the scores.
        lowest = torch.finfo(torch.float64).min
        added = torch.zeros(TOTAL, TOTAL, dtype=torch.float64).masked_fill(~allowed, lowest)
        given |= {"attention_mask": (allowed if attention == "sdpa" else added)[None, None]}
    return given


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(packed ids, padded ids, attention mask)."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = torch.randint(3, 50, mask.shape, generator=generator) * mask
    return padded[mask][None], padded, mask.long()


def counted(model: nn.Module, norms: dict[str, nn.Module], inputs: dict[str, Any]) -> set[int]:
    """Return how many tokens the norms average over in a call."""
    seen = []
    with observe(norms, on_input=lambda call: seen.append(int(call.moments().count))):
        model(**inputs)
    assert len(seen) >= len(norms)
    return set(seen)


@pytest.mark.parametrize(
    ("family", "attention", "kind"),
    [
        ("llama", "sdpa", "positions"),
        ("llama", "eager", "cu_seq_lens"),
        ("llama", "sdpa", "block mask"),
        ("qwen2", "eager", "positions"),
        ("qwen2", "eager", "block mask"),
        ("gpt2", "sdpa", "positions"),
        ("gpt2", "eager", "seq_idx"),
        ("bert", "sdpa", "block mask"),
    ],
)
def test_all_tokens_of_a_packed_row_count(family: str, attention: str, kind: str) -> None:
    """The norms then see what they see of the padded batch (norms/test_nested.py)."""
    model = build(family, attention, "bn")
    norms = {name: m for name, m in model.named_modules() if isinstance(m, powernorm.BatchNorm)}
    packed, padded, mask = batch(0)
    given = {"input_ids": packed, **flat(attention, family != "bert", kind)}
    assert counted(model, norms, given) == {TOTAL}
    assert counted(model, norms, {"input_ids": padded, "attention_mask": mask}) == {TOTAL}


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (None, TOTAL),
        (torch.ones(1, TOTAL, dtype=torch.long), TOTAL),
        (torch.tensor([[1] * 5 + [2] * 2 + [3] * 5 + [0] * 2]), TOTAL - 2),
    ],
    ids=["none", "ones", "segments"],
)
def test_tokens_that_count(mask: Tensor | None, count: int) -> None:
    """In a row of segment numbers 0 is padding, and what is above 1 counts as 1 does."""
    model = build("llama", "sdpa", "bn")
    inputs = {"input_ids": batch(0)[0], "attention_mask": mask}
    assert counted(model, {"norm": model.norm}, inputs) == {count}
