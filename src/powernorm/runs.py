"""The run folder: the names of its files and the types of their rows.

Training writes run folders and the report reads them; this module is all that the two share.

```
COMPARISON/                 one folder a comparison
  results.json              ComparisonResults: settings, baselines, one RunResult a run
  report.html               self-contained report
  RUN/                      one folder a run, named by `run_name`
    config.json             the full configuration of the run
    metrics.csv             one row a logged step (METRICS_COLUMNS; empty cells where not logged)
    norms.csv               one row a norm and monitored step (NORMS_COLUMNS)
    result.json             RunResult, written when the run has ended
    scales.json             ScalesRecord, where `training.record_scales` asks for it
    diagnosis.json          DiagnosisRecord, written by `powernorm diagnose`
    checkpoints/            last.ckpt, best.ckpt, early.ckpt where the recipe asks for it
    tensorboard/            event files
VERDICT_STUDY/              comparisons in many settings, see VerdictResults
  verdict.json              VerdictResults
  SETTING/                  one folder a comparison
```
"""

from typing import Any, Final, Literal, NotRequired, TypedDict

RESULTS_FILE: Final = "results.json"
REPORT_FILE: Final = "report.html"
CONFIG_FILE: Final = "config.json"
METRICS_FILE: Final = "metrics.csv"
NORMS_FILE: Final = "norms.csv"
RESULT_FILE: Final = "result.json"
DIAGNOSIS_FILE: Final = "diagnosis.json"
SCALES_FILE: Final = "scales.json"
VERDICT_FILE: Final = "verdict.json"
CHECKPOINTS_FOLDER: Final = "checkpoints"

METRICS_COLUMNS: Final = (
    "step",
    "epoch",
    "tokens",
    "seconds",
    "learning_rate",
    "train_loss",
    "valid_loss",
    "valid_perplexity",
    "gap_running_loss",
    "gap_batch_loss",
)
"""Losses are in nats per token, perplexities per word, seconds since the start of the run.

The last two are of a few validation batches, by running statistics and by each batch's own (see
`powernorm.diagnosis.evaluation_gap`); empty for norms without batch statistics.
"""

NORMS_COLUMNS: Final = (
    "step",
    "layer",
    "norm",
    "mean_tid",
    "var_tid",
    "mean_distance",
    "var_distance",
    "num_nonfinite_batches",
    "gradient_norm",
    "mean_gradient_norm",
    "var_gradient_norm",
    "token_gradient_mean",
    "token_gradient_var",
    "outlier_share",
    "nonfinite_input",
    "nonfinite_gradient",
    "first_nonfinite",
)
"""Online TID of SPEC 5 as fractions; distances are (1/d)·‖batch - running‖ (Shen et al., Fig. 2).

A norm that does not centre (PowerNorm, MABN) has empty mean columns; its var columns hold the
quadratic mean. A norm without batch statistics has none of these. Then Frobenius norms of the
gradient of the norm's input and of its parts g_μ and g_σ² or g_ψ² (Shen et al., Fig. 3, 4); mean
over tokens of the mean and of the variance over features of that gradient (Xu et al. 2019,
Theorem 1); for AdaNorm and SimpleLayerNorm the share of |y| above 1/k (eq. 7); the number of
calls in the step whose input or whose gradient was not finite, and 1 for the norm that was the
first to see that, else 0.
"""

Status = Literal["finished", "diverged", "nonfinite", "interrupted", "failed"]
"""How a run ended.

`diverged`: its loss rose above the unigram baseline for good; `nonfinite`: its loss became NaN or
infinite; `interrupted`: stopped by the user, `--resume` continues it; `failed`: an exception.
"""


class TID(TypedDict):
    """Two-pass Training Inference Discrepancy (Wang et al. 2022, Definition 1), as fractions."""

    mean_last: float | None
    var_last: float
    mean_avg: float | None
    var_avg: float


class EvaluationRow(TypedDict):
    """Loss of a trained model whose norms evaluate by one kind of statistics (W22, Table 7, 8)."""

    statistics: str
    """`running`, `re-estimated`, or `batch`."""
    tokens: int | None
    """Average of the batches, for `batch`; None for batches as they were given."""
    loss: float


SMALLEST_GAP: Final = 1e-3
"""A share of the loss: of smaller gaps between two evaluations a quotient would be noise."""


class ThresholdRecord(TypedDict):
    """A number that a verdict compares with."""

    quantity: str
    limit: float
    source: str
    """Where the limit comes from."""


class VerdictRecord(TypedDict):
    """What to do with the norms of a model."""

    action: Literal["keep", "swap", "swap lowest"]
    norm: str | None
    """Short name of what to swap to."""
    lowest: int | None
    """With `swap lowest`: the number of layers."""
    side: NotRequired[str]
    """And of which stack, `encoder` or `decoder`, in a model that has both."""
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


class ScalesRecord(TypedDict):
    """The contents of `scales.json`."""

    format: Literal[1]
    layers: list[ScaleRecord]


class DiagnosisRecord(TypedDict):
    """The contents of `diagnosis.json`."""

    format: Literal[1]
    model: str
    """Class of the model, or name of the run."""
    step: int | None
    """Of the checkpoint."""
    num_batches: int
    num_tokens: int
    """Valid tokens in all batches."""
    padding: float
    """Share of padded positions."""
    layers: list[dict[str, Any]]
    """DIAGNOSIS_COLUMNS, and what else a layer has."""
    verdict: VerdictRecord
    batch_sizes: list[BatchSizeRow]
    spectra: list[SpectrumRecord]
    scales: list[ScaleRecord]
    evaluation: list[EvaluationRow]
    """Empty where no loss was given."""
    notes: list[str]
    """What the reader should know: layers that no batch went through, masks that do not fit."""


DIAGNOSIS_COLUMNS: Final = (
    "layer",
    "norm",
    "mean_tid",
    "var_tid",
    "pnv_tid",
    "pn_tid",
    "padded_mean_tid",
    "padded_var_tid",
    "num_outliers",
    "outlier_ratio",
    "outlier_feature",
    "top_position",
    "top_position_ratio",
    "lambda_1",
    "kappa_20",
    "kappa_50",
    "kappa_80",
    "verdict",
    "reason",
)
"""One row a layer of a diagnosis: two-pass TID of SPEC 5 as fractions for BatchNorm (`mean_tid`,
`var_tid`), PowerNormV (`pnv_tid`) and PowerNorm behind GroupScaling (`pn_tid`), the first two
again with padding counted as tokens (empty without padding), features whose root mean square is
far above the median feature's, the position in the sequence with the largest mean square, and the
conditioning of the layer's input: the largest eigenvalue of its covariance and κ_p = λ_1/λ_⌈p d⌉
(Wang et al. 2022, Fig. 6, 7).
"""


class StudyInfo(TypedDict):
    """What a study varies, for its figure."""

    name: str
    title: str
    x_label: str
    """Empty where the variants have no number."""
    y_label: NotRequired[str]
    """Of the second number, for grids."""
    logarithmic: bool
    """Whether the x axis is."""
    source: str
    """The paper's figure or table that it repeats."""


class RunResult(TypedDict):
    """What one run came to."""

    norm: str
    seed: int
    placement: Literal["pre", "post"]
    status: Status
    metrics: dict[str, float | None]
    """`valid_perplexity`, `test_perplexity` (per word), `valid_loss`, `test_loss` (nats/token)."""
    tid: TID | None
    seconds: float
    tokens_per_second: float | None
    parameters: int
    folder: str
    """The run's folder, relative to the comparison's."""
    message: NotRequired[str]
    """Why the run failed or where it stopped."""
    label: NotRequired[str]
    """Name of the variant in a study; elsewhere the norm's short name is the name."""
    x: NotRequired[float | None]
    """Where the variant lies on the study's axis."""
    y: NotRequired[float | None]
    """And on the second axis of a grid."""
    study: NotRequired[StudyInfo]
    """Of which it is a variant; in the run's own file only, should `results.json` be lost."""


class Baseline(TypedDict):
    """A model without a network over the same vocabulary: what every norm has to beat."""

    name: Literal["unigram", "bigram", "word"]
    metrics: dict[str, float | None]


class ComparisonResults(TypedDict):
    """The contents of `results.json`."""

    format: Literal[1]
    task: str
    preset: str
    placement: Literal["pre", "post"]
    settings: dict[str, Any]
    """The whole configuration, plus `versions` and `machine` of the comparison."""
    data: dict[str, Any]
    """Name, source, licence and sizes of the corpus."""
    baselines: list[Baseline]
    runs: list[RunResult]
    study: NotRequired[StudyInfo]


class GapRecord(TypedDict):
    """Loss of a norm minus that of LayerNorm at the end of the training, nats per token."""

    valid: list[float]
    """One a seed, in the order of `seeds`; of seeds that both finished with a finite loss."""
    test: list[float]
    seeds: list[int]
    num_lost: int
    """Seeds in which the norm's loss became NaN or infinite, and LayerNorm's did not."""
    num_base_lost: int
    """The other way round."""


class VerdictSetting(TypedDict):
    """One setting of the experiment: what was seen early and what came of it."""

    name: str
    group: str
    task: str
    placement: Literal["pre", "post"]
    tokens_per_batch: float
    num_layers: int
    num_features: int
    learning_rate: float
    max_steps: int
    early_step: int
    early: dict[str, float | None]
    """Quantities at the early checkpoint of the first seed, by EARLY_QUANTITIES."""
    advice: str | None
    """What `powernorm.diagnose` says of the early LayerNorm model with its default limits: a norm,
    or `ln` for keep; `lowest K to NORM`. None where that model was lost by then."""
    gaps: dict[str, GapRecord]
    """By norm; what was not trained yet is missing."""


EARLY_QUANTITIES: Final = (
    "ln_mean_tid_last",
    "ln_var_tid_last",
    "ln_total_tid_last",
    "ln_mean_tid_avg",
    "ln_var_tid_avg",
    "ln_total_tid_avg",
    "ln_pn_tid_last",
    "ln_pn_tid_avg",
    "bn_mean_tid_last",
    "bn_var_tid_last",
    "bn_mean_tid_avg",
    "bn_var_tid_avg",
    "bn_gap",
    "rbn_gap",
    "pn_gap",
    "bn_batch_gap",
    "rbn_batch_gap",
    "pn_batch_gap",
)
"""TID as fractions: what BatchNorm (PowerNorm behind GroupScaling) would see in the early LayerNorm
model, and what BatchNorm does see in the early BatchNorm model; total is mean and var together;
`…_gap` is the norm's loss minus LayerNorm's on the valid split at that time, `…_batch_gap` the same
with the norm evaluated by the statistics of each batch, since running ones lag behind early."""


class PredictorScore(TypedDict):
    """How often a predictor has the sign of the final gap right."""

    norm: str
    """Whose gap to LayerNorm is predicted."""
    predictor: str
    """A quantity of EARLY_QUANTITIES, `tokens_per_batch`, `early_gap` or `early_gap_batch` (those
    of the norm), the same with ` > 0` for its sign, `majority`, `always worse` or `always better`
    (whichever is right more often), `verdict` (the norm's default limit of `diagnose`)."""
    num_settings: int
    num_positive: int
    """Settings in which the norm is worse than LayerNorm."""
    threshold: float | None
    """Chosen on the choosing half; None where nothing is chosen. Above it the norm is predicted to
    be worse (below it for `tokens_per_batch`)."""
    hits_choosing: float
    """Share of right signs in the half on which the threshold was chosen."""
    hits_scored: float
    """Share of right signs in the other half."""
    num_scored: int
    interval: tuple[float, float]
    """95 % interval of `hits_scored` (Wilson)."""
    splits_mean: float
    """Mean of `hits_scored` over many random splits."""
    splits_interval: tuple[float, float]
    """2.5 % and 97.5 % quantile of the same."""
    leave_one_out: float
    """Share of right signs where the threshold is chosen on all other settings."""
    leave_one_out_clear: float | None
    """The same over the settings with a clear gap only."""
    leave_one_group_out: float | None
    """The same where the threshold is chosen on the other groups; None for one group."""
    num_clear: int
    """Settings whose gap has one sign in all seeds and is at least `clear_gap`."""
    auc: float | None
    """Chance that a setting with a worse norm has the larger value than one with a better norm."""
    auc_alike: float | None
    """The same chance among pairs of settings with about as many tokens in a batch: what the
    quantity knows beyond the size of the batch."""
    num_alike: int
    """Such pairs."""
    rank_correlation: float | None
    """Spearman's, of the quantity and the gap."""


class AdviceScore(TypedDict):
    """What it is worth to follow a rule that names one of ln, bn, rbn and pn in every setting."""

    rule: str
    """`advice` (that of `diagnose`, where swapping only the lowest layers counts as keeping), or
    the norm that is always taken."""
    num_settings: int
    """Settings in which all four norms were trained; the same for all rules."""
    num_no_worse: int
    """Settings whose norm ended at most `clear_gap` worse than LayerNorm."""
    num_best: int
    """Settings whose norm ended at most `clear_gap` worse than the best of the four."""


class VerdictResults(TypedDict):
    """The contents of `verdict.json`."""

    format: Literal[1]
    preset: str
    num_batches: int
    """Training batches in each pass of an early diagnosis."""
    clear_gap: float
    """Nats per token."""
    choosing: list[str]
    """Names of the settings on which thresholds were chosen."""
    settings: list[VerdictSetting]
    scores: list[PredictorScore]
    advice: list[AdviceScore]
    """Empty where no setting has all four norms."""


def run_name(norm: str, placement: str, seed: int) -> str:
    """The folder name of a run.

    >>> run_name("pn", "pre", 1)
    'pn-pre-seed1'
    """
    return f"{norm}-{placement}-seed{seed}"
