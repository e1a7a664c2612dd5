"""The models of the benchmark of half precision compute one function, and overflow where said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import half_precision
import powernorm
from half_precision import NORMS, Answer, changed, errors, limits, outputs, variants
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.tasks.lm.model import LanguageModel


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def model_of(norm: str, tokens: Tensor) -> LanguageModel:
    shape = TransformerShape(num_features=64, num_layers=1, num_heads=4, feedforward_features=128)
    model = LanguageModel(50, lambda n: powernorm.build_norm(norm, n), shape, max_length=8)
    with torch.no_grad():
        for _ in range(20):
            model.train()(tokens)
    return model.double().eval()


@pytest.mark.parametrize("norm", NORMS)
def test_every_stream_is_the_same_function(norm: str, tokens: Tensor) -> None:
    model = model_of(norm, tokens)
    expected = model(tokens)
    for _, by, offset in variants(norm, 64):
        torch.testing.assert_close(changed(model, by, offset)(tokens), expected)


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM"])
def test_a_bert_with_a_larger_stream_is_the_same_function(kind: str, tokens: Tensor) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    torch.manual_seed(0)
    bert = getattr(transformers, kind)(transformers.BertConfig(**sizes, intermediate_size=32))
    bert = bert.double().eval()
    with torch.no_grad():
        expected = Answer(bert, 1)(tokens)
        torch.testing.assert_close(Answer(bert, 300)(tokens), expected)
    assert expected.shape == (*tokens.shape, 16 if kind == "BertModel" else 50)


@pytest.mark.slow
def test_a_square_overflows_where_a_folded_norm_does_not(tokens: Tensor) -> None:
    errors = {}
    for norm in ("ln", "bn"):
        model = model_of(norm, tokens)
        exact = model(tokens).detach().numpy()
        same = changed(model, torch.full((64,), 300.0, dtype=torch.float64))
        if norm == "bn":
            same = powernorm.fold(same, tokens, tied="untie").model
        errors[norm] = {
            way: float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
            for way, logits in outputs(same, tokens)
        }
    assert not errors["ln"]["float16 runtime"] < 0.5
    assert errors["ln"]["torch float16"] < 0.01
    assert max(errors["bn"].values()) < 0.05
    assert set(errors["bn"]) == {"torch float16", "torch bfloat16", *half_precision.ENGINES}


def test_the_page_is_of_the_stored_rows() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "benchmarks/results/half.jsonl").read_text(encoding="utf-8").splitlines()
    stored = [json.loads(line) for line in lines]
    page = (root / "docs/half-precision.md").read_text(encoding="utf-8")
    for table in (limits(stored), errors(stored, "offset"), errors(stored, "spread")):
        assert "\n".join(table) in page


def test_tables_say_from_where_on_it_is_broken_and_by_how_much() -> None:
    found = [
        {"norm": "ln", "seed": seed, stream: value, "way": "torch float16", "error": error}
        for stream in ("scale", "offset")
        for seed in (0, 1)
        for value, error in ((1, 0.002), (30, 0.02 if seed else 0.2), (100, None))
    ]
    assert list(limits(found))[-1] == "| `ln` | 0.002, from 30 |"
    assert "| torch float16 | `ln` | 0.002 | 0.11 | inf |" in errors(found, "offset")
