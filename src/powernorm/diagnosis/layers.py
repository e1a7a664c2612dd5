"""What a diagnosis says of one norm."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from powernorm.inspection.selection import Side
from powernorm.runs import DIAGNOSIS_COLUMNS

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class LayerDiagnosis:
    """One norm: two-pass TID (fractions), outliers, conditioning, verdict.

    Attributes:
        layer: dotted name.
        norm: short name of what it computes now.
        index: number of its Transformer layer, 0 next to the input; None outside.
        side: `encoder` or `decoder`, in a model that has both.
        uses_batch_statistics: whether it does so now.
        centered: whether it, or what is advised in its place first (bn), subtracts a mean.
        mean_tid: E_B mean_c |μ_B - μ|/σ_B (Wang et al. 2022, Definition 1) of what the norm
            normalises; None for one with batch statistics that does not centre.
        var_tid: E_B mean_c |σ_B - σ|/σ_B, or of ψ for such a norm.
        pnv_tid: E_B mean_c |ψ_B - ψ|/ψ_B of the input: what PowerNormV would see.
        pn_tid: the same behind a GroupScaling with one group: what PowerNorm would see.
        padded_mean_tid: `mean_tid` with padding counted as tokens; None where nothing is padded.
        padded_var_tid: `var_tid` likewise.
        num_outliers: features whose root mean square is above 6 times the median feature's.
        outlier_ratio: of the loudest feature to the median one.
        outlier_feature: its index.
        top_position: position with the largest mean square, from the first valid token; None
            where the input is no batch of sequences.
        top_position_ratio: to the median position.
        lambda_1: largest eigenvalue of the input's covariance (Wang et al. 2022, Fig. 7).
        kappa_20: λ_1/λ_⌈0.2 d⌉ (Fig. 6); infinite for a degenerate covariance.
        kappa_50: λ_1/λ_⌈0.5 d⌉.
        kappa_80: λ_1/λ_⌈0.8 d⌉.
        verdict: `keep`, or the short name of a norm to swap to.
        reason: of the verdict, with its numbers.
    """

    layer: str
    norm: str
    index: int | None
    side: Side | None
    uses_batch_statistics: bool
    centered: bool
    mean_tid: float | None
    var_tid: float
    pnv_tid: float | None
    pn_tid: float | None
    padded_mean_tid: float | None
    padded_var_tid: float | None
    num_outliers: int
    outlier_ratio: float
    outlier_feature: int
    top_position: int | None
    top_position_ratio: float | None
    lambda_1: float | None
    kappa_20: float | None
    kappa_50: float | None
    kappa_80: float | None
    verdict: str = ""
    reason: str = ""

    @property
    def total_tid(self) -> float:
        """Mean and var TID together, as the verdict compares it."""
        return (self.mean_tid or 0.0) + self.var_tid

    @property
    def padded_total_tid(self) -> float | None:
        """The same with padding counted; None where nothing is padded."""
        if self.padded_var_tid is None:
            return None
        return (self.padded_mean_tid or 0.0) + self.padded_var_tid

    def to_row(self) -> dict[str, Cell]:
        """The values by name, in the order of `powernorm.runs.DIAGNOSIS_COLUMNS`."""
        return {name: getattr(self, name) for name in DIAGNOSIS_COLUMNS}

    def to_json(self) -> dict[str, Cell]:
        """All values by name; infinite ones, for which JSON has no word, as None."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
