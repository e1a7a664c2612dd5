"""The example of a classifier in integers alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import integer_only
import powernorm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_it_computes_the_bits_of_plain_python(capsys: pytest.CaptureFixture[str]) -> None:
    found = integer_only.main(200)
    assert min(found["BatchNorm"], found["int8"]) > 0.9
    assert found["int8, trained with quantizers"] > found["BatchNorm"] - 0.02
    assert found["bytes"] < 8192
    printed = capsys.readouterr().out
    assert "all 370 series: the bits of plain Python" in printed
    assert "'rsqrt': 3" in printed


def quantized(weight: Tensor) -> Tensor:
    """A weight on a grid of 255 values for each row."""
    scale = weight.detach().abs().amax(1) / 127
    zeros = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -128, 127)


def test_a_fold_takes_weights_off_the_grid_that_they_were_trained_on() -> None:
    """Why quantizers come after the fold: γ/σ of each input feature is no scale of a row."""
    torch.manual_seed(0)
    norm, linear = powernorm.BatchNorm(16), nn.Linear(16, 8)
    x = torch.randn(64, 16) * torch.linspace(0.5, 2, 16)
    for _ in range(50):
        norm(x)
    with torch.no_grad():
        linear.weight.copy_(quantized(linear.weight))
        torch.testing.assert_close(quantized(linear.weight), linear.weight)
        folded = powernorm.fold(nn.Sequential(norm, linear).eval(), x).model
        weight = folded[1].weight  # type: ignore[index]
        error = (quantized(weight) - weight).abs().amax(1) / (weight.abs().amax(1) / 127)
    assert (error > 0.4).all()
