"""Features and positions with much larger magnitudes than the others."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from powernorm.norms.pointwise import SaturatingNorm

LOUD: Final = 6.0
"""Ratio of a feature's root mean square to the median feature's above which it is an outlier: a
choice of this library, after the magnitude 6 of Dettmers et al. 2022."""


def loud_features(second_moment: Tensor) -> dict[str, float]:
    """Return number of outliers, and index and ratio of the largest feature, as columns.

    Args:
        second_moment: mean squares, (C,). The ratio of the largest root to the median one is
            infinite if more than half of the features are 0.
    """
    root = second_moment.sqrt()
    ratios = torch.nan_to_num(root / root.median(), nan=1.0, posinf=torch.inf)
    ratio, feature = ratios.max(dim=0)
    return {
        "num_outliers": int((ratios > LOUD).sum()),
        "outlier_ratio": ratio.item(),
        "outlier_feature": int(feature),
    }


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

    def cells(self) -> dict[str, float]:
        """Return the columns that have a value."""
        if self._sinks is None or not self._num_tokens:
            return {}
        count, feature = self._sinks.max(0)
        cells: dict[str, float] = {"sink_share": int(count) / self._num_tokens}
        if count:
            cells["sink_feature"] = int(feature)
        if self._norm is not None:
            values = self._num_tokens * len(self._sinks)
            cells["saturated_share"] = self._num_saturated / values
            cells["slope"] = float(self._norm.slope.detach())
        return cells


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

    def cells(self) -> dict[str, float]:
        """Return the position with the largest mean square, and its ratio to the median position's.

        Both columns are missing if there are fewer than two positions.
        """
        total, count = self._sums
        known = count > 0
        if int(known.sum()) < 2:
            return {}
        mean = total[known] / count[known]
        position = int(mean.argmax())
        median = mean.median()
        ratio = (mean[position] / median).item() if median > 0 else float("inf")
        return {"top_position": position, "top_position_ratio": ratio}
