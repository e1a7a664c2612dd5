"""Records of diagnoses, as in their files and tables, and names of a saved model's files.

The module needs no torch: reports read these files on machines without it.
"""

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
    """A `LayerRow` and further columns of a layer; empty if the model could not be diagnosed
    during its training, for the reason in `notes`."""
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


class LayerRow(TypedDict):
    """A layer of a diagnosis, which may have more columns.

    Two-pass TID of SPEC 5 as fractions for BatchNorm (`mean_tid`, `var_tid`), PowerNormV
    (`pnv_tid`) and PowerNorm behind GroupScaling (`pn_tid`), the first two again with padding
    counted as tokens (empty without padding), features whose root mean square is far above the
    median feature's, the position in the sequence with the largest mean square, and the
    conditioning of the layer's input: the largest eigenvalue of its covariance and
    κ_p = λ_1/λ_⌈p d⌉ (Wang et al. 2022, Fig. 6, 7). Later columns: values beyond the linear range
    of DyT and its kin, their slope, and the feature that is most often more than 100 times the
    token's median magnitude (a residual sink), with the share of tokens.
    """

    layer: str
    norm: str
    mean_tid: float | None
    var_tid: float | None
    pnv_tid: float | None
    pn_tid: float | None
    padded_mean_tid: float | None
    padded_var_tid: float | None
    num_outliers: float | None
    outlier_ratio: float | None
    outlier_feature: float | None
    top_position: float | None
    top_position_ratio: float | None
    lambda_1: float | None
    kappa_20: float | None
    kappa_50: float | None
    kappa_80: float | None
    verdict: str | None
    reason: str | None
    saturated_share: NotRequired[float | None]
    slope: NotRequired[float | None]
    sink_feature: NotRequired[float | None]
    sink_share: NotRequired[float | None]


DIAGNOSIS_COLUMNS: Final = tuple(LayerRow.__annotations__)
