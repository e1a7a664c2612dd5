"""Distances of a batch's statistics from reference statistics, per layer: TID and plain norms.

Both come from the moments of a batch, or from sums over tokens that give the statistics of every
norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from powernorm.diagnosis.targets import Target
from powernorm.norms import BatchStatisticsNorm
from powernorm.ops.moments import Moments

_CONSTANT = 1e-12
"""A feature whose variance is below this share of its quadratic mean is constant in the batch."""


TOTAL: Final = 0
SQUARES: Final = 1
RAW_SQUARES: Final = 2
SCALED_SQUARES: Final = 3
NUM_SUMS: Final = 4
"""Rows of the sums: Σu and Σu² of the values to normalize (u = x except with GroupScaling), Σx²,
and Σ of the squares after a GroupScaling with one group."""

TIDS: Final = ("mean_tid", "var_tid", "pnv_tid", "pn_tid")
"""Columns of the discrepancies of a batch."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics that a layer normalizes by, running or of a population; each (C,) in float64.

    Attributes:
        mean: None for a layer that does not center.
        square: the biased or running variance; the quadratic mean ψ² if `mean` is None.
    """

    mean: Tensor | None
    square: Tensor

    @classmethod
    def running(cls, layer: BatchStatisticsNorm) -> Statistics:
        """Return the current running statistics of a layer."""
        if layer.centered:
            return cls(
                layer.get_buffer("running_mean").double(), layer.get_buffer("running_var").double()
            )
        return cls(None, layer.get_buffer("running_second_moment").double())

    @classmethod
    def of(cls, moments: Moments, *, centered: bool) -> Statistics:
        """Return the statistics of a set of tokens."""
        if centered:
            return cls(moments.mean, moments.var)
        return cls(None, moments.second_moment)


def discrepancies(batch: Moments, reference: Statistics, eps: float) -> tuple[Tensor, Tensor]:
    """Return the TID of one batch: the means over features of |μ_B - μ|/σ_B and |σ_B - σ|/σ_B.

    Wang et al. 2022, Definition 1, before its expectation over batches; σ_B is biased. Without
    centering the second is |ψ_B - ψ|/ψ_B. If a feature is constant in the batch, so that σ_B
    is 0 or rounding noise, the denominator is sqrt(eps), the divisor of the layer.

    Args:
        batch: moments of the valid tokens of a batch, or of several, one per row.
        reference: running or population statistics.
        eps: the layer's.

    Returns:
        (mean part, variance part), float64 fractions, 0-d or one per batch; the mean part of a
        layer that does not center is NaN.
    """
    centered = reference.mean is not None
    own = Statistics.of(batch, centered=centered)
    deviation = own.square.sqrt()
    constant = own.square <= _CONSTANT * batch.second_moment
    denominator = torch.where(constant, eps**0.5, deviation)
    var_part = ((deviation - reference.square.sqrt()).abs() / denominator).mean(-1)
    if own.mean is None or reference.mean is None:
        return torch.full_like(var_part, torch.nan), var_part
    return ((own.mean - reference.mean).abs() / denominator).mean(-1), var_part


def fluctuations(batch: Moments, reference: Statistics) -> tuple[Tensor, Tensor]:
    """Return (1/d)·‖μ_B - μ‖ and (1/d)·‖σ²_B - σ²‖ (ψ² without centering), 0-d float64.

    Shen et al. 2020, Figures 2 and 4; the first is NaN for a layer that does not center.
    """
    own = Statistics.of(batch, centered=reference.mean is not None)
    size = own.square.shape[-1]
    var_part = torch.linalg.vector_norm(own.square - reference.square, dim=-1) / size
    if own.mean is None or reference.mean is None:
        return torch.full_like(var_part, torch.nan), var_part
    return torch.linalg.vector_norm(own.mean - reference.mean, dim=-1) / size, var_part


def sums_per_token(target: Target, x: Tensor) -> Tensor:
    """Return the terms of the sums, (tokens, NUM_SUMS, C) in float64.

    Args:
        target: norm with the input x.
        x: (tokens, C).
    """
    tokens = x.double()
    own = tokens if target.batch_layer is None else target.normalized(x).double()
    squares = tokens.square()
    scaled = squares / (squares.mean(-1, keepdim=True) + target.eps)
    return torch.stack([own, own.square(), squares, scaled], dim=1)


def statistics_of(target: Target, count: int, sums: Tensor) -> list[Statistics]:
    """Return the statistics of tokens for the target, PowerNormV and PowerNorm in its place.

    Args:
        target: norm with these tokens as input.
        count: their number.
        sums: the sums over them, (NUM_SUMS, C).
    """
    centered = (target.centered, False, False)
    found = zip(_moments(count, sums), centered, strict=True)
    return [Statistics.of(moments, centered=each) for moments, each in found]


def batch_discrepancies(
    target: Target, population: Sequence[Statistics], count: int, sums: Tensor
) -> Tensor:
    """Return one batch's TID for each norm that could be used: (len(TIDS),) float64.

    Wang et al. 2022, Definition 1, before its expectation; NaN for the mean of a norm that does
    not center. The arguments are those of `statistics_of`, and its result for the population.
    """
    pairs = zip(_moments(count, sums), population, strict=True)
    own, raw, scaled = (discrepancies(batch, whole, target.eps) for batch, whole in pairs)
    return torch.stack([*own, raw[1], scaled[1]])


def _moments(count: int, sums: Tensor) -> list[Moments]:
    number, zeros = sums.new_full((), float(count)), torch.zeros_like(sums[TOTAL])
    totals = ((sums[TOTAL], SQUARES), (zeros, RAW_SQUARES), (zeros, SCALED_SQUARES))
    return [Moments.from_sums(number, total, sums[row]) for total, row in totals]
