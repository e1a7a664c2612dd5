"""What is kept of the tokens of a norm's input: sums that give the statistics of every norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from powernorm.diagnosis.distances import Statistics, discrepancies
from powernorm.diagnosis.subjects import Subject
from powernorm.ops.moments import Moments

TOTAL: Final = 0
SQUARES: Final = 1
RAW_SQUARES: Final = 2
SCALED_SQUARES: Final = 3
NUM_SUMS: Final = 4
"""Rows of the sums: Σu and Σu² of what the norm normalises (u = x but for norms with GroupScaling),
Σx², and Σ of the squares behind a GroupScaling with one group."""

NUM_DISCREPANCIES: Final = 4
"""mean_tid, var_tid, pnv_tid, pn_tid."""


def sums_per_token(subject: Subject, x: Tensor) -> Tensor:
    """The terms of the sums, (tokens, NUM_SUMS, C) in float64.

    Args:
        subject: whose input it is.
        x: (tokens, C).
    """
    tokens = x.double()
    own = tokens if subject.batch_layer is None else subject.normalised(x).double()
    squares = tokens.square()
    scaled = squares / (squares.mean(-1, keepdim=True) + subject.eps)
    return torch.stack([own, own.square(), squares, scaled], dim=1)


@dataclass(frozen=True, eq=False)
class Population:
    """Statistics that a batch's are compared with, for each norm that might stand there."""

    own: Statistics
    raw: Statistics
    scaled: Statistics

    @classmethod
    def of(cls, subject: Subject, count: Tensor, sums: Tensor) -> Population:
        """From sums over tokens, (NUM_SUMS, C)."""
        own, raw, scaled = _moments(count, sums)
        return cls(
            Statistics.of(own, centered=subject.centered),
            Statistics.of(raw, centered=False),
            Statistics.of(scaled, centered=False),
        )


def batch_discrepancies(
    subject: Subject, population: Population, count: Tensor, sums: Tensor
) -> Tensor:
    """TID of one batch for each norm that might stand there: (NUM_DISCREPANCIES,) float64.

    Wang et al. 2022, Definition 1, before its expectation; NaN for the mean of a norm that does
    not centre.
    """
    own, raw, scaled = _moments(count, sums)
    mean, var = discrepancies(own, population.own, subject.eps)
    _, pnv = discrepancies(raw, population.raw, subject.eps)
    _, pn = discrepancies(scaled, population.scaled, subject.eps)
    return torch.stack([mean, var, pnv, pn])


def _moments(count: Tensor, sums: Tensor) -> tuple[Moments, Moments, Moments]:
    nothing = torch.zeros_like(sums[TOTAL])
    return (
        Moments(count, sums[TOTAL], sums[SQUARES]),
        Moments(count, nothing, sums[RAW_SQUARES]),
        Moments(count, nothing, sums[SCALED_SQUARES]),
    )
