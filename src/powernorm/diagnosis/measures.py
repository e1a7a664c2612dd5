"""Measures of a norm's input, as columns of a diagnosis, and spectra of embeddings."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.norms.pointwise import SaturatingNorm
from powernorm.records import SpectrumRecord

SHARES: Final = {"kappa_20": 0.2, "kappa_50": 0.5, "kappa_80": 0.8}
"""p of κ_p in Wang et al. 2022, Fig. 6, by column."""

MAX_TOKENS: Final = 16384
"""Largest number of tokens in a covariance: more cost time and change little."""
MAX_FEATURES: Final = 4096

_ROWS: Final = 4096
"""Number of rows of a table that are converted to float64 at a time."""


def conditioning(covariance: Tensor, *, rounding: float = 1e-14) -> dict[str, float]:
    """Return λ_1 and κ_p = λ_1/λ_⌈p d⌉ (Wang et al. 2022, section 4.3) of a covariance, as columns.

    Args:
        covariance: a symmetric matrix, (C, C).
        rounding: eigenvalues below this share of the largest count as 0; a κ with such a
            denominator is infinite.
    """
    values = torch.linalg.eigvalsh(covariance.double()).flip(0)
    largest = max(values[0].item(), 0.0)
    cells = {"lambda_1": largest}
    for name, share in SHARES.items():
        # Without the small number, products such as 0.2 · 5 would round up to the next index.
        value = values[max(math.ceil(share * values.shape[0] - 1e-9), 1) - 1]
        cells[name] = largest / value.item() if value > rounding * largest else math.inf
    return cells


class CovarianceSums:
    """Sums for the covariance of tokens over batches, up to `MAX_TOKENS` tokens.

    Numerics: products are computed in float32, of tokens that are centered by the first batch's
    mean, and summed in float64, so that a large mean costs no precision.
    """

    def __init__(self) -> None:
        self._shift: Tensor | None = None
        self._products: Tensor | None = None
        self._total: Tensor | None = None
        self._count = 0

    def add(self, tokens: Tensor) -> None:
        """Add tokens, (tokens, C)."""
        tokens = tokens[: MAX_TOKENS - self._count]
        if not tokens.shape[0] or tokens.shape[1] > MAX_FEATURES:
            return
        dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
        tokens = tokens.to(dtype)
        if self._shift is None:
            self._shift = tokens.mean(0)
        centered = tokens - self._shift
        products, total = (centered.T @ centered).double(), centered.double().sum(0)
        if self._products is None or self._total is None:
            self._products, self._total = products, total
        else:
            self._products, self._total = self._products + products, self._total + total
        self._count += tokens.shape[0]

    def cells(self) -> dict[str, float]:
        """Return the conditioning of the tokens so far.

        The columns are missing for fewer than two tokens, or if a product of two features was
        beyond float32.
        """
        covariance = self.covariance()
        if covariance is None or self._shift is None or not covariance.isfinite().all():
            return {}
        return conditioning(covariance, rounding=10 * torch.finfo(self._shift.dtype).eps)

    def covariance(self) -> Tensor | None:
        """Return the biased covariance, (C, C) in float64; None for fewer than two tokens."""
        if self._products is None or self._total is None or self._count < 2:
            return None
        mean = self._total / self._count
        return self._products / self._count - torch.outer(mean, mean)


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


def embedding_spectra(model: nn.Module, notes: dict[str, None]) -> list[SpectrumRecord]:
    """Return the spectrum of each large embedding, a shared one once (Shen et al. 2020, Fig. 6).

    Tables with less than half of the rows of the largest, such as those of positions and token
    types, are left out.

    Args:
        model: any module.
        notes: receives a note for each table with NaN or infinity, which has no spectrum.
    """
    tables: dict[int, tuple[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not module.weight.is_meta:
            tables.setdefault(id(module.weight), (name or "embedding", module.weight.detach()))
    most = max((weight.shape[0] for _, weight in tables.values()), default=0)
    found = []
    for name, weight in tables.values():
        if 2 * weight.shape[0] < most:
            continue
        if not bool(weight.isfinite().all()):
            notes[f"{name} holds NaN or infinite values: it has no spectrum"] = None
            continue
        found.append(SpectrumRecord(name=name, values=normalized_spectrum(weight)))
    return found


@torch.no_grad()
def normalized_spectrum(matrix: Tensor) -> list[float]:
    """Return the singular values of a matrix in falling order, divided by the largest.

    All are 0 for a matrix of zeros.

    Numerics: they are the roots of the eigenvalues of its smaller Gram matrix in float64, so values
    below 1e-8 of the largest are rounding.
    """
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64, device="cpu")
    for rows in matrix.detach().split(_ROWS):
        part = rows.cpu().double()
        gram += part.T @ part
    values = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).sqrt()
    largest = values[0].item()
    return [value / largest if largest else 0.0 for value in values.tolist()]
