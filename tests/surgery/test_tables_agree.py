"""Swap, fold, diagnosis and calibration list the same norms of a model, each once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from architectures import huggingface_models, other_models
from architectures.survey import Architecture, Request
from covering import some_default
from powernorm.inspection.finder import find_norms
from surgery.foreign_models import FAMILIES

ARCHITECTURES = {
    one.name: one for one in (*huggingface_models.ARCHITECTURES, *other_models.ARCHITECTURES)
}
FURTHER = (
    "albert", "bloom", "data2vec-audio", "deberta-v2", "electra", "falcon", "gemma2", "gpt_neox",
    "gpt2", "hubert", "mamba2", "modernbert", "mpnet", "mpt", "olmo2", "opt", "phi3", "qwen3",
    "qwen3_next", "rembert", "roberta-prelayernorm", "stablelm", "t5", "wav2vec2-conformer",
    "whisper",
)  # fmt: skip
TIMM = tuple(name for name in ARCHITECTURES if name.startswith(("timm/", "torchvision/")))


class Conformer(nn.Module):
    """A block of a Conformer: LayerNorms, and a BatchNorm behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.final_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.bn(self.conv(x.transpose(1, 2))).relu().transpose(1, 2)
        z: Tensor = self.final_norm(x)
        return z


def check(model: nn.Module, batches: list[dict[str, Any]]) -> None:
    model.eval()
    names = [norm.names[0] for norm in find_norms(model)]
    assert sorted(row.name for row in powernorm.plan_swap(model, "bn").rows) == sorted(names)
    diagnosis = powernorm.diagnose(model, batches, spectra=False)
    measured = [row.name for row in (*diagnosis.rows, *diagnosis.left_out)]
    assert sorted(measured) == sorted(names)
    powernorm.swap(model, "bn")
    names = [norm.names[0] for norm in find_norms(model)]
    rows = powernorm.calibrate(model, batches, way="one_pass").rows
    assert sorted(row.name for row in rows) == sorted(names)
    try:
        folded = powernorm.plan_fold(model, batches[0]).rows
    except powernorm.InputError:  # an architecture that torch.export cannot trace
        return
    assert sorted(row.name for row in folded) == sorted(names)


@pytest.mark.parametrize(
    "family",
    some_default(FAMILIES, "language-model", "torch-transformer"),
)
def test_of_each_family(family: str) -> None:
    model, inputs = FAMILIES[family]()
    check(model, [inputs, _other(inputs)])


def _other(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return another call of the same shapes."""
    return {
        name: (
            value + 0.5 * torch.randn_like(value) if value.is_floating_point() else value.flip(1)
        )
        if isinstance(value, Tensor) and value.ndim > 1
        else value
        for name, value in inputs.items()
    }


def test_of_a_conformer() -> None:
    check(Conformer(), [{"x": torch.randn(3, 5, 8)} for _ in range(2)])


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("name", [*FURTHER, *TIMM])
def test_of_an_architecture(name: str) -> None:
    architecture: Architecture = ARCHITECTURES[name]
    model = architecture.build()
    inputs = architecture.inputs(Request())
    check(model, [inputs, _other(inputs)])
