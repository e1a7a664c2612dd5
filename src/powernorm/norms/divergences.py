"""Divergences of batch statistics from the running ones, which Regularized BatchNorm penalizes.

The gradients are written out for eager mode, which needs value and gradient at once. For compiled
code the values are differentiable themselves, with respect to the batch's mean and variance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.arguments import shown

Divergence = Literal["diff", "diff2", "relative", "jeffreys"]
"""See `RegularizedBatchNorm`."""


class Compared(NamedTuple):
    """Statistics that a divergence compares, per feature: (C,) each, of one type."""

    mean: Tensor
    """μ_B."""
    var: Tensor
    """σ²_B, biased."""
    running_mean: Tensor
    """μ_run after the step's update, a constant."""
    running_var: Tensor
    """σ²_run after the step's update, a constant."""
    eps: float
    """eps of the layer."""
    floor: bool
    """Whether s² = max(σ², eps), as in released variants, not σ² + eps."""

    def squares(self) -> tuple[Tensor, Tensor]:
        """Return s²_B and s²_run, the squared divisors of the layer."""
        if self.floor:
            return self.var.clamp(min=self.eps), self.running_var.clamp(min=self.eps)
        return self.var + self.eps, self.running_var + self.eps


class Terms(NamedTuple):
    """A divergence per feature, without λ; (C,) each."""

    mean: Tensor
    """Factor of λ_mean."""
    var: Tensor
    """Factor of λ_var."""
    mean_by_mean: Tensor
    """Derivative of `mean` by μ_B."""
    var_by_var: Tensor
    """Derivative of `var` by σ²_B."""
    mean_by_var: Tensor | None = None
    """Derivative of `mean` by σ²_B; None for 0."""


def check_divergence(divergence: str) -> Divergence:
    """Return the name of a divergence, or raise an InputError that lists them."""
    if divergence not in get_args(Divergence):
        names = ", ".join(map(repr, get_args(Divergence)))
        raise InputError(
            f"penalty is {shown(divergence)}, expected one of {names}: it names the divergence, "
            "mean_penalty and var_penalty are its factors"
        )
    return cast(Divergence, divergence)


def divergence_terms(divergence: Divergence, compared: Compared) -> Terms:
    """Return the terms of a divergence and their gradients."""
    return _TERMS[divergence](compared)


def _difference(c: Compared) -> Terms:
    mean_gap, var_gap = c.running_mean - c.mean, c.running_var - c.var
    return Terms(mean_gap.square(), var_gap.abs(), -2 * mean_gap, -var_gap.sign())


def _difference_of_deviations(c: Compared) -> Terms:
    mean_gap = c.running_mean - c.mean
    std, running_std = (square.sqrt() for square in c.squares())
    gap = running_std - std
    by_var = _through_floor(c, -gap / std)
    return Terms(mean_gap.square(), gap.square(), -2 * mean_gap, by_var)


def _relative_difference(c: Compared) -> Terms:
    terms, inverse = _difference(c), c.squares()[1].reciprocal()
    return Terms(*(term * inverse for term in terms[:4]))


def _jeffreys(c: Compared) -> Terms:
    square, running_square = c.squares()
    inverse, running_inverse = square.reciprocal(), running_square.reciprocal()
    mean_gap, gap = c.running_mean - c.mean, running_square - square
    weight = (inverse + running_inverse) / 2
    # Products of ratios, because a gap's fourth power would leave the range of float32 much
    # earlier.
    return Terms(
        mean_gap.square() * weight,
        (gap * inverse) * (gap * running_inverse) / 2,
        -2 * mean_gap * weight,
        _through_floor(
            c, (gap * inverse) * (1 + running_square * inverse) * running_inverse * -0.5
        ),
        _through_floor(c, (mean_gap * inverse).square() * -0.5),
    )


def _through_floor(c: Compared, by_square: Tensor) -> Tensor:
    """Return the derivative by σ²_B, given that by s²_B."""
    return torch.where(c.var >= c.eps, by_square, 0.0) if c.floor else by_square


_TERMS: Final[Mapping[Divergence, Callable[[Compared], Terms]]] = {
    "diff": _difference,
    "diff2": _difference_of_deviations,
    "relative": _relative_difference,
    "jeffreys": _jeffreys,
}
