"""Folding around statistics that stay, in families of transformers: exact, in the same class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from architectures.huggingface_models import ARCHITECTURES
from architectures.survey import Request, tensors_of
from surgery.folding.wide_floats import WideFloats
from surgery.foreign_models import transformers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

BY_NAME = {one.name: one for one in ARCHITECTURES}
GENERATING = {
    # name: (norms, of which fold, of which all but the bias)
    "bloom": (6, 4, 0),
    "codegen": (3, 3, 2),
    "cohere": (3, 2, 0),
    "deepseek_v3": (9, 6, 0),
    "falcon": (3, 2, 2),
    "gemma": (5, 4, 0),
    "gemma2": (9, 4, 0),
    "gemma3_text": (13, 4, 0),
    "gpt2": (5, 4, 0),
    "gpt_neox": (5, 5, 1),
    "gptj": (3, 3, 2),
    "llama": (5, 5, 0),
    "mistral": (5, 5, 0),
    "mixtral": (5, 5, 0),
    "olmo2": (9, 1, 0),
    "opt": (5, 4, 0),
    "phi": (3, 3, 0),
    "qwen2": (5, 5, 0),
    "qwen3": (9, 5, 0),
    "stablelm": (5, 5, 5),
    "starcoder2": (5, 4, 0),
    "t5": (12, 10, 0),
}
"""Language models of two layers: what becomes of their norms."""
OTHERS = {
    "bert": (6, 1, 0),
    "clip_vision_model": (6, 4, 0),
    "vit": (5, 5, 0),
    "modernbert": (6, 4, 0),
}
TYPICAL = ("gemma", "gptj")
"""Families in the default suite: an offset, a tied head, parallel sub-layers, kept biases."""


def grid(names: Any) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow)
        for name in sorted(names)
    ]


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    return BY_NAME[name].build(), BY_NAME[name].inputs(Request())


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def outputs(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """All outputs in float64 throughout."""
    with torch.no_grad(), WideFloats():
        return list(tensors_of(model(**widened(inputs))))


@pytest.fixture
def wide_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tokens with the matrices of experts in float64, which torch's own refuse."""
    transformers()
    from transformers.integrations import moe

    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)


@pytest.mark.usefixtures("wide_experts")
@pytest.mark.parametrize("name", grid({**GENERATING, **OTHERS}))
def test_families_fold_exactly(name: str) -> None:
    model, inputs = built(name)
    model.double()
    report = powernorm.fold(model, widened(inputs), keep="statistics", inplace=False, verify=False)
    norms, folds, biases = {**GENERATING, **OTHERS}[name]
    done = [row for row in report.rows if row.action == "fold"]
    with_bias = [row for row in done if row.reason]
    assert (len(report.rows), len(done), len(with_bias)) == (norms, folds, biases)
    assert all(row.reason for row in report.rows if row.action != "fold")
    for first, second in zip(model.modules(), report.model.modules(), strict=True):
        assert type(first) is type(second)
    architecture = BY_NAME[name]
    requests = [Request()]
    requests += [Request((11, 11), seed=6)] if architecture.takes_lengths else []
    requests += [Request((10, 7), 3, seed=7, masked=True)] if architecture.takes_mask else []
    for request in requests:
        again = architecture.inputs(request)
        pairs = zip(outputs(model, again), outputs(report.model, again), strict=True)
        for before, after in pairs:
            assert before.dtype == torch.float64
            scale = before.nan_to_num(0.0, 0.0, 0.0).abs().max()
            assert (after - before).nan_to_num().abs().max() <= 1e-12 * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(GENERATING))
def test_the_stock_class_loads_it_and_generates_the_same_tokens(name: str, tmp_path: Path) -> None:
    model, inputs = built(name)
    ids = inputs["input_ids"]
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    if model.config.is_encoder_decoder:
        settings["decoder_start_token_id"] = 1
    expected = model.generate(ids, **settings)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = powernorm.fold(model, inputs, keep="statistics")
    assert report.is_stock
    powernorm.save(model, tmp_path / "stock", stock=True)
    model.save_pretrained(tmp_path / "saved")
    for folder in ("stock", "saved"):
        loaded = type(model).from_pretrained(tmp_path / folder)
        assert type(loaded) is getattr(transformers(), type(model).__name__)
        assert loaded.state_dict().keys() == before.keys()
        assert torch.equal(loaded.eval().generate(ids, **settings), expected)
    report.undo()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
