"""Records of diagnoses, as in their files and tables, and names of a saved model's files.

The module needs no torch: reports read these files on machines without it.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads it in Python 3.11, too

Placement = Literal[
    "pre",
    "post",
    "sandwich",
    "peri",
    "out",
    "mix",
    "deepnorm",
    "normformer",
    "bn-ffn",
    "bn-linear",
    "lns",
    "hybrid",
]
"""Position of the norms in a Transformer."""

CONFIG_FILE: Final = "config.json"
MODEL_FILE: Final = "powernorm.safetensors"
"""File in a folder of `powernorm.save`, which has a `config.json` like a run but is none."""
MONITORED: Final = {
    "mean_tid": "online TID of the mean, a fraction (Wang et al. 2022, Fig. 4)",
    "var_tid": "online TID of the deviation, or of ψ for a norm that does not center",
    "mean_distance": "(1/d)·‖μ_B - μ‖ (Shen et al. 2020, Fig. 2)",
    "var_distance": "(1/d)·‖σ²_B - σ²‖, or of ψ² (Fig. 2, 4)",
    "num_nonfinite_batches": "batches so far whose statistics were not finite",
    "gradient_norm": "Frobenius norm of the gradient of the norm's input",
    "mean_gradient_norm": "that of its part g_μ through the mean (Fig. 3)",
    "var_gradient_norm": "that of its part g_σ² or g_ψ² (Fig. 3, 4)",
    "token_gradient_mean": "mean over tokens of that gradient's mean (Xu et al. 2019, Theorem 1)",
    "token_gradient_var": "mean over tokens of its variance over features",
    "outlier_share": "share of |y| above 1/k, for AdaNorm and SimpleLayerNorm (eq. 7)",
    "nonfinite_input": "calls in the step whose input was not finite",
    "nonfinite_gradient": "calls in the step whose input gradient was not finite",
    "first_nonfinite": "1 for the norm in which that occurred first, else 0",
    "saturated_share": "share of |z| > 1 in y = γ f(z) + β, for DyT, Derf and DyISRU",
    "slope": "dz/dx of the same, which is α or 1/√B",
    "input_scale": "root mean square of the input over valid tokens, for norms without batch "
    "statistics; for a final Identity that is the scale of the head's input",
}
"""Quantities of `powernorm.diagnosis.NormMonitor`, computed by `powernorm.diagnosis.observers`.

Only norms with batch statistics have the first five and the parts of the gradient; without
centering they have no mean columns.
"""
NORMS_COLUMNS: Final = ("step", "layer", "norm", *MONITORED)
"""Columns of `norms.csv`."""


class TID(TypedDict):
    """Two-pass Training Inference Discrepancy (Wang et al. 2022, Definition 1), as fractions."""

    mean_last: float | None
    var_last: float
    mean_avg: float | None
    var_avg: float


class EvaluationRow(TypedDict):
    """Loss of a trained model whose norms evaluate by one kind of statistics (W22, Table 7, 8)."""

    statistics: str
    """`running`, `re-estimated`, `re-estimated in one pass`, or `batch`."""
    tokens: int | None
    """Average size of the batches, for `batch`; None for batches as they were given."""
    loss: float
    """Loss; if there are scores, over the same whole split."""
    size: NotRequired[int]
    """For `batch` with scores, the batches' target size: the maximum of positions, padding
    included, if they are cut by tokens (W22's max-tokens), else the approximate number of
    tokens."""
    scores: NotRequired[dict[str, float | None]]
    """The task's scores of a whole split, by the names of a run's metrics, such as `test_bleu`."""


SMALLEST_GAP: Final = 1e-3
"""Smallest gap between two evaluations, relative to the loss, whose ratio is not just noise."""


class ThresholdRecord(TypedDict):
    """A number that a verdict compares with."""

    quantity: str
    limit: float
    source: str
    """Source of the limit."""


class VerdictRecord(TypedDict):
    """Advice about the norms of a model."""

    action: Literal["keep", "swap", "swap lowest"]
    norm: str | None
    """Short name of the norm to swap to."""
    lowest: int | None
    """With `swap lowest`: the number of layers."""
    side: NotRequired[str]
    """The stack of these layers, `encoder` or `decoder`, in a model that has both."""
    reasons: list[str]
    thresholds: list[ThresholdRecord]


def swap_call(verdict: VerdictRecord) -> str:
    """Return the call of `powernorm.swap` that follows a verdict; empty if norms are kept.

    >>> swap_call({"action": "swap lowest", "norm": "bn", "lowest": 2, "reasons": [],
    ...     "thresholds": []})
    'powernorm.swap(model, "bn", powernorm.Where(lowest=2))'
    """
    norm, where = verdict["norm"], ""
    if verdict["action"] == "keep" or norm is None:
        return ""
    if verdict["action"] == "swap lowest":
        side = f', side="{verdict["side"]}"' if "side" in verdict else ""
        where = f", powernorm.Where(lowest={verdict['lowest']}{side})"
    return f'powernorm.swap(model, "{norm}"{where})'


class BatchSizeRow(TypedDict):
    """TID of one layer when the same tokens come in batches of another size, as fractions."""

    layer: str
    tokens: int
    num_batches: int
    mean_tid: float | None
    var_tid: float | None
    pnv_tid: float | None
    pn_tid: float | None


class SpectrumRecord(TypedDict):
    """Singular values of an embedding matrix, divided by the largest (S20, Fig. 6)."""

    name: str
    values: list[float]


class ScaleRecord(TypedDict):
    """γ of each feature against the batch's deviation there (S20, App. B.1)."""

    layer: str
    weight: list[float]
    deviation: list[float]


class PaperStatistic(TypedDict):
    """A number that a paper prints of the statistics of a trained norm."""

    norm: str
    """Short name."""
    placement: Placement
    dataset: str
    metric: str
    """A key of `TID`, whose values are in percent here, or the name of a run's metric."""
    value: float
    source: str
    """Paper and table."""
    statistics: NotRequired[str]
    """Statistics with which the model is scored, as in `EvaluationRow`; absent for a TID."""
    size: NotRequired[int]
    """Size of the batches, for `batch`."""


class DiagnosisRecord(TypedDict):
    """The contents of `diagnosis.json`."""

    format: Literal[1]
    model: str
    """Class of the model, or name of the run."""
    step: int | None
    """Step of the checkpoint, or of the training at the time of the diagnosis."""
    epoch: NotRequired[float]
    """Completed passes over the training data, for a diagnosis during the training."""
    num_batches: int
    num_tokens: int
    """Valid tokens in all batches."""
    padding: float
    """Share of padded positions."""
    layers: list[dict[str, Any]]
    """`DIAGNOSIS_COLUMNS` and further columns of each layer; empty if the model could not be
    diagnosed during its training, for the reason in `notes`."""
    verdict: VerdictRecord
    batch_sizes: list[BatchSizeRow]
    spectra: list[SpectrumRecord]
    scales: list[ScaleRecord]
    evaluation: list[EvaluationRow]
    """Empty if no loss was given."""
    notes: list[str]
    """Remarks for the reader: layers that no batch went through, masks that do not fit."""
    paper: NotRequired[list[PaperStatistic]]
    """A paper's printed statistics of the run's norm, if the run has its recipe or a part of it."""


PERCENT: Final = {"percent": True}
"""Metadata of a field that is a fraction and printed in percent."""


@dataclass(frozen=True, kw_only=True)
class LayerMeasures:
    """Quantities of one norm that `powernorm.diagnose` measures, by their names in files.

    A field with a default is missing in the files of earlier versions. TID is a fraction.

    Attributes:
        mean_tid: `E_B mean_c |μ_B - μ|/σ_B` (Wang et al. 2022, Definition 1) of the norm's input;
            None for a norm with batch statistics that does not center.
        var_tid: `E_B mean_c |σ_B - σ|/σ_B`, or of ψ for such a norm.
        pnv_tid: `E_B mean_c |ψ_B - ψ|/ψ_B` of the input, as PowerNormV would see it.
        pn_tid: the same after a GroupScaling with one group, as PowerNorm would see it.
        padded_mean_tid: `mean_tid` with padding counted as tokens; None if nothing is padded.
        padded_var_tid: `var_tid` likewise.
        num_outliers: number of features whose root mean square is above 6 times the median's.
        outlier_ratio: root mean square of the largest feature, divided by the median feature's.
        outlier_feature: index of the largest feature.
        top_position: position with the largest mean square, from the first valid token; None
            if the input is not a batch of sequences.
        top_position_ratio: its mean square divided by the median position's.
        lambda_1: largest eigenvalue of the input's covariance (Wang et al. 2022, Fig. 7).
        kappa_20: λ_1/λ_⌈0.2 d⌉ (Fig. 6); infinite for a degenerate covariance.
        kappa_50: λ_1/λ_⌈0.5 d⌉.
        kappa_80: λ_1/λ_⌈0.8 d⌉.
        saturated_share: share of the values beyond the linear range of DyT, Derf or DyISRU
            (`|z| > 1` in `y = γ f(z) + β`); None for other norms.
        slope: their dz/dx, α or 1/√B.
        sink_feature: index of the feature that is more than 100 times the token's median magnitude
            in most tokens (a residual sink); None if there is none.
        sink_share: its share of tokens.
    """

    mean_tid: float | None = field(metadata=PERCENT)
    var_tid: float = field(metadata=PERCENT)
    pnv_tid: float | None = field(metadata=PERCENT)
    pn_tid: float | None = field(metadata=PERCENT)
    padded_mean_tid: float | None = field(metadata=PERCENT)
    padded_var_tid: float | None = field(metadata=PERCENT)
    num_outliers: int
    outlier_ratio: float
    outlier_feature: int
    top_position: int | None
    top_position_ratio: float | None
    lambda_1: float | None
    kappa_20: float | None
    kappa_50: float | None
    kappa_80: float | None
    saturated_share: float | None = field(default=None, metadata=PERCENT)
    slope: float | None = None
    sink_feature: int | None = None
    sink_share: float | None = field(default=None, metadata=PERCENT)


DIAGNOSED: Final = tuple(one.name for one in fields(LayerMeasures))
DIAGNOSIS_COLUMNS: Final = ("layer", "norm", *DIAGNOSED, "verdict", "reason")
"""Columns of a diagnosis's table of layers."""
