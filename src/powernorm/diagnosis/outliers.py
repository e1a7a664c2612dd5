"""Features and positions with much larger magnitudes than the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.norms.pointwise import SaturatingNorm

LOUD: Final = 6.0
"""Ratio of a feature's root mean square to the median feature's above which it is an outlier: a
choice of this library, after the magnitude 6 of Dettmers et al. 2022."""


@dataclass(frozen=True, slots=True)
class LoudFeatures:
    """Features whose root mean square is far above the median feature's."""

    num_outliers: int
    ratio: float
    """Ratio of the largest to the median; infinite if more than half of the features are 0."""
    feature: int
    """Index of the largest."""


def loud_features(second_moment: Tensor) -> LoudFeatures:
    """Count the outliers and find the largest feature, given mean squares, (C,)."""
    root = second_moment.sqrt()
    ratios = torch.nan_to_num(root / root.median(), nan=1.0, posinf=torch.inf)
    ratio, feature = ratios.max(dim=0)
    return LoudFeatures(int((ratios > LOUD).sum()), ratio.item(), int(feature))


SINK: Final = 100.0
"""Ratio of a value to the median magnitude of its token above which it is a residual sink; Qiu et
al. 2026 define these as the few features that are large in most tokens."""


class TokenShares:
    """Shares of tokens or values beyond a bound: residual sinks, and saturated values.

    Args:
        norm: norm whose inputs are added.
    """

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm if isinstance(norm, SaturatingNorm) else None
        self._sinks: Tensor | None = None
        self._num_tokens = self._num_saturated = 0

    def add(self, tokens: Tensor) -> None:
        """Add valid tokens, (n, C)."""
        size = tokens.abs()
        sinks = (size > SINK * size.median(-1, keepdim=True).values).sum(0).cpu()
        self._sinks = sinks if self._sinks is None else self._sinks + sinks
        self._num_tokens += len(tokens)
        if self._norm is not None:
            self._num_saturated += int((self._norm.argument(tokens).abs() > 1).sum())

    def values(self) -> dict[str, float | None]:
        """Return the columns of `DiagnosisRow`; None for those without a value."""
        if self._sinks is None or not self._num_tokens:
            return dict.fromkeys(("sink_feature", "sink_share", "saturated_share", "slope"))
        count, feature = self._sinks.max(0)
        norm = self._norm
        total = self._num_tokens * len(self._sinks)
        return {
            "sink_feature": int(feature) if count else None,
            "sink_share": int(count) / self._num_tokens,
            "saturated_share": None if norm is None else self._num_saturated / total,
            "slope": None if norm is None else float(norm.slope.detach()),
        }


class PositionEnergy:
    """Mean square of the tokens at each position of a sequence, counted from its first valid one.

    Language models often hold large values in their first token (attention sinks). Batch statistics
    are then dominated by a few tokens.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(2, 0, dtype=torch.float64, device="cpu")

    def add(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Add a batch of sequences; inputs of other shapes are ignored.

        Args:
            x: (batch, length, C).
            padding_mask: (batch, length).
        """
        if x.ndim != 3:
            return
        valid = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        if padding_mask is not None:
            valid = ~padding_mask
        positions = (valid.cumsum(1) - 1)[valid].cpu()
        energies = x[valid].double().square().mean(-1).cpu()
        length = max(x.shape[1], self._sums.shape[1])
        sums = torch.zeros(2, length, dtype=torch.float64, device="cpu")
        sums[:, : self._sums.shape[1]] = self._sums
        sums[0].index_add_(0, positions, energies)
        sums[1].index_add_(0, positions, torch.ones_like(energies))
        self._sums = sums

    def loudest(self) -> tuple[int, float] | None:
        """Return the position with the largest mean square, and its ratio to the median position's.

        Returns:
            None if there are fewer than two positions.
        """
        total, count = self._sums
        known = count > 0
        if int(known.sum()) < 2:
            return None
        mean = total[known] / count[known]
        position = int(mean.argmax())
        median = mean.median()
        ratio = (mean[position] / median).item() if median > 0 else float("inf")
        return position, ratio
