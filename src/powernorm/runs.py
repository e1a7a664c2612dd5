"""The run folder: the names of its files and the types of their rows.

Training writes run folders and the report reads them; this module is all that the two share.

```
COMPARISON/                 one folder a comparison
  comparison.json           ComparisonHead: what is compared, written before the first run
  results.json              ComparisonResults: settings, baselines, one RunResult a run
  work.json                 what other processes have to know to train the runs that are left
  workers/                  what the workers of `--jobs` printed
  report.html               self-contained report
  tuning.json               of `powernorm tune`: how the settings were chosen, TuningRecord
  trials.csv                one row a trial (TRIALS_COLUMNS, then the settings by dotted key)
  trials/                   a folder as this one, of the trials
  optuna.db                 the trials as Optuna has them
  RUN/                      one folder a run, named by `run_name`
    config.json             the full configuration of the run
    metrics.csv             one row a logged step (METRICS_COLUMNS; empty cells where not logged;
                            then what else the run logged, under its own names)
    norms.csv               one row a norm and monitored step (NORMS_COLUMNS)
    result.json             RunResult, written when the run has ended
    scales.json             ScalesRecord, where `training.record_scales` asks for it
    diagnosis.json          DiagnosisRecord, written by `powernorm diagnose`
    diagnoses.jsonl         one DiagnosisRecord a line, in the order of the steps, where
                            `training.diagnose_every` asks for them
    translations.tsv        source, reference, translation of the test split (task translation)
    checkpoints/            last.ckpt, best.ckpt; early.ckpt where the recipe asks for it;
                            step-N.safetensors (weights of the last validations) and
                            average.safetensors where it averages checkpoints
    tensorboard/            event files
```

All but the diagnoses' JSON files end in their checksum, `powernorm.json_reading.SEAL`.

The classes with attributes, as RunResult, are read and written by `powernorm.lab.schema`: a field
without a default is always in the file, one with a default only where it has another value. Their
fields are in the order of the files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, get_args

from typing_extensions import TypedDict  # which pydantic reads in Python 3.11, too

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
"""Where the norms of a Transformer stand; `lab.models.placements` says where that is."""
PLACEMENTS: Final[tuple[Placement, ...]] = get_args(Placement)

TASKS: Final = ("lm", "translation", "classify", "ner", "parse", "image", "lm-char", "sequences")
"""Names of the built-in tasks, in the order in which they are listed; the help needs no more."""

STUDIES: Final = (
    "micro-batches",
    "lowest-layers",
    "penalties",
    "alphas",
    "scales",
    "layernorm-parts",
    "future",
)
"""Names of the studies of variants of a norm."""

COMPARISON_FILE: Final = "comparison.json"
RESULTS_FILE: Final = "results.json"
WORK_FILE: Final = "work.json"
REPORT_FILE: Final = "report.html"
TUNING_FILE: Final = "tuning.json"
TRIALS_FILE: Final = "trials.csv"
TRIALS_FOLDER: Final = "trials"
TRIALS_COLUMNS: Final = ("norm", "trial", "status", "value", "step", "seconds", "folder")
"""`value` is what the trials are judged by, of those that came to their end; `trial` is Optuna's
number, from 0."""
CONFIG_FILE: Final = "config.json"
METRICS_FILE: Final = "metrics.csv"
NORMS_FILE: Final = "norms.csv"
RESULT_FILE: Final = "result.json"
DIAGNOSIS_FILE: Final = "diagnosis.json"
DIAGNOSES_FILE: Final = "diagnoses.jsonl"
DIAGNOSIS_PAGE: Final = "diagnosis.html"
SCALES_FILE: Final = "scales.json"
SUBWORDS_FILE: Final = "subwords.json"
"""The vocabulary of a run's model of translation."""
REMOVAL_FILE: Final = "removal.json"
TRANSLATIONS_FILE: Final = "translations.tsv"
TRANSLATIONS_COLUMNS: Final = ("source", "reference", "translation")
BEST_SCORED: Final = "best checkpoint"
"""What a result says of its scores where they are those of the best checkpoint."""
LAST_SCORED: Final = "last checkpoint"
AVERAGE_SCORED: Final = "average of the last"
CHECKPOINTS_FOLDER: Final = "checkpoints"
MODEL_FILE: Final = "powernorm.safetensors"
"""Of a folder of `powernorm.save`, which has a `config.json` as a run has, and is none."""


def is_run_folder(path: Path) -> bool:
    """Return whether a folder is a run's, over or not.

    A model of another library has a config.json, too, and another name.
    """
    is_begun = re.search(r"-seed\d+$", path.name) and (path / CONFIG_FILE).is_file()
    is_any = is_begun or (path / RESULT_FILE).is_file()
    return bool(is_any) and not (path / MODEL_FILE).is_file()


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
    "valid_score",
)
"""Losses are in nats per token, perplexities per word, seconds since the start of the run.

The gaps are of a few validation batches, by running statistics and by each batch's own (see
`powernorm.diagnosis.evaluation_gap`); empty for norms without batch statistics. The last is the
task's own measure of the valid split, or of a sample of it: `score` in results.json says which.
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
    "saturated_share",
    "slope",
)
"""Online TID of SPEC 5 as fractions; distances are (1/d)·‖batch - running‖ (Shen et al., Fig. 2).

A norm that does not center (PowerNorm, MABN) has empty mean columns; its var columns hold the
quadratic mean. A norm without batch statistics has none of these. Then Frobenius norms of the
gradient of the norm's input and of its parts g_μ and g_σ² or g_ψ² (Shen et al., Fig. 3, 4); mean
over tokens of the mean and of the variance over features of that gradient (Xu et al. 2019,
Theorem 1); for AdaNorm and SimpleLayerNorm the share of |y| above 1/k (eq. 7); the number of
calls in the step whose input or whose gradient was not finite, and 1 for the norm that was the
first to see that, else 0. Of DyT, Derf and DyISRU the share of values beyond the linear range
(|z| > 1 of `y = γ f(z) + β`), and dz/dx, which is α or 1/√B.
"""

Status = Literal[
    "finished", "diverged", "nonfinite", "interrupted", "failed", "dropped", "pruned", "unfinished"
]
"""How a run ended.

`diverged`: of a built-in task, its loss rose above the first baseline (the unigram) for good; of an
own one, its goal is worse than the first baseline's, or the function says so;
`nonfinite`: its loss became NaN or infinite; `interrupted`: stopped by the user, `--resume`
continues it; `failed`: an exception; `dropped`: not trained, or not to the end, because the race
was decided; `pruned`: a trial of a tuning that fell behind the earlier ones; `unfinished`: in no
result, the run is still going or was killed.
"""

LOST: Final[frozenset[Status]] = frozenset({"diverged", "nonfinite"})
"""Statuses of runs whose loss was lost."""
OVER: Final[frozenset[Status]] = LOST | {"finished", "pruned"}
"""Statuses of runs that `resume` leaves as they are."""


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
    """Average of the batches, for `batch`; None for batches as they were given."""
    loss: float
    """Where there are scores, of the same split as they, whole."""
    size: NotRequired[int]
    """For `batch` with scores, what the batches were made for: positions at most, padding included,
    where they are cut by tokens (W22's max-tokens), else about so many tokens."""
    scores: NotRequired[dict[str, float | None]]
    """The task's own, of a whole split, by the names of a run's metrics, such as `test_bleu`."""


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
    """With which the model is scored, as in `EvaluationRow`; absent for a TID."""
    size: NotRequired[int]
    """Of the batches, for `batch`."""


class DiagnosisRecord(TypedDict):
    """The contents of `diagnosis.json`."""

    format: Literal[1]
    model: str
    """Class of the model, or name of the run."""
    step: int | None
    """Of the checkpoint, or updates that were done when it was made."""
    epoch: NotRequired[float]
    """Passes over the training data that were done, of a diagnosis during the training."""
    num_batches: int
    num_tokens: int
    """Valid tokens in all batches."""
    padding: float
    """Share of padded positions."""
    layers: list[dict[str, Any]]
    """A `LayerRow` and what else a layer has; empty where the model could not be diagnosed
    during its training, for the reason in `notes`."""
    verdict: VerdictRecord
    batch_sizes: list[BatchSizeRow]
    spectra: list[SpectrumRecord]
    scales: list[ScaleRecord]
    evaluation: list[EvaluationRow]
    """Empty where no loss was given."""
    notes: list[str]
    """What the reader should know: layers that no batch went through, masks that do not fit."""
    paper: NotRequired[list[PaperStatistic]]
    """What a paper prints of the run's norm, where the run is of its recipe or a reduced one."""


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


class StudyInfo(TypedDict):
    """What a study varies, for its figure."""

    name: str
    title: str
    x_label: str
    """Empty where the variants have no number."""
    logarithmic: bool
    """Whether the x axis is."""
    source: str
    """The paper's figure or table that it repeats."""
    y_label: NotRequired[str]
    """Of the second number, for grids."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What one run came to."""

    norm: str
    seed: int
    placement: Placement | None = None
    """None for an own function."""
    status: Status
    metrics: dict[str, float | None]
    """`valid_perplexity`, `test_perplexity` (per word; of translations per subword), `valid_loss`,
    `test_loss` (nats/token); of translations also those of TRANSLATION_METRICS, and of other tasks
    their scores (`test_accuracy`, in percent, and the like). Of an own function what it returned,
    under any names; None for a number that is not finite."""
    tid: TID | None
    seconds: float
    """0 of a run that nobody has trained to an end."""
    tokens_per_second: float | None
    parameters: int | None
    """None where the run does not know its model."""
    folder: str
    """The run's folder, relative to the comparison's."""
    label: str = ""
    """Name of the variant in a study; elsewhere the norm's short name is the name."""
    x: float | None = None
    """Where the variant lies on the study's axis."""
    y: float | None = None
    """And on the second axis of a grid."""
    remark: str = ""
    """What has to stand beside every number of the run, such as `sees the future`."""
    examples_per_second: float | None = None
    """Rows of the batches, such as images, that the training took in a second, where that is worth
    telling."""
    scored: str = ""
    """Which weights the metrics are of: `best checkpoint`, `best checkpoint by valid_accuracy`
    where that and not the loss chose it or `average of the last N
    checkpoints, running statistics recalibrated` (or `averaged`); empty where the run does not
    say."""
    signatures: dict[str, str] = field(default_factory=dict)
    """How TRANSLATION_METRICS were computed, in sacrebleu's words, by their names."""
    message: str = ""
    """Why the run failed or where it stopped."""
    ran_on: dict[str, str | int] = field(default_factory=dict)
    """`host`, `worker` and `gpu` of the worker that trained it, or ended it; empty where
    `compare` trained it itself."""
    study: StudyInfo | None = None
    """Of which it is a variant; in the run's own file only, should `results.json` be lost."""

    @classmethod
    def empty(cls, **known: Any) -> "RunResult":
        """Return the result of a run that nobody has trained to an end."""
        known |= {"metrics": {}, "seconds": 0.0}
        return cls(tid=None, tokens_per_second=None, parameters=None, **known)

    @property
    def name(self) -> str:
        """What the run is called: the variant's label, else the norm's short name."""
        return self.label or self.norm


TRANSLATION_METRICS: Final = (
    "test_bleu",
    "test_bleu_tokenised",
    "test_bleu_lowercase",
    "test_chrf",
    "decoding_tokens_per_second",
)
"""Corpus scores of the translations of the test split, 0 to 100: detokenized, cased BLEU; BLEU of
Moses tokens, cased; the same in lower case; chrF. Then target subwords that the search gave in a
second, end marks included. A comparison may ask for `test_bleu_compound` besides, BLEU of Moses
tokens, cased, with compounds split at their dashes.
"""


class PaperRecord(TypedDict):
    """A number that a paper prints, to stand beside ours."""

    norm: str
    """Short name, or the label of a variant."""
    placement: Placement
    dataset: str
    metric: str
    """Name among the metrics of a run, such as `test_bleu_tokenised`."""
    value: float | None
    """None where the paper says that the training diverged; a BLEU of 0 is one that failed."""
    source: str
    """Paper and table."""
    against: NotRequired[list[str]]
    """The norms that the paper compares this one with; without it LayerNorm."""


class ChangeRecord(TypedDict):
    """A setting that is not as in a preset."""

    here: NotRequired[Any]
    """Its value in the comparison; absent where that is the default."""
    preset: NotRequired[Any]
    """Its value in the preset; absent where that is the default."""


class ChangesRecord(TypedDict):
    """The settings that are not as in the preset that a comparison stands for."""

    preset: str
    """Its name: of a paper's experiment, or of the comparison's own."""
    settings: dict[str, ChangeRecord]
    """By dotted name, as `--set` takes it; of those that bear on what the comparison comes to."""


class Goal(TypedDict):
    """What a comparison is about."""

    metric: str
    """Name among the metrics of its runs."""
    direction: Literal["min", "max"]
    """Which way is better."""


class ChosenTrial(TypedDict):
    """The best trial of a norm."""

    trial: int
    """Its number, from 0."""
    value: float
    """Of the valid split."""
    settings: dict[str, Any]
    """By dotted key."""


class NormTuning(TypedDict):
    """How the settings of one norm were chosen."""

    search: dict[str, str]
    """Ranges by dotted key, as `--search` takes them."""
    trials: dict[str, int]
    """How many ended with each status; all of them count."""
    untuned: float | None
    """What the recipe's own settings came to, which are the first trial."""
    best: ChosenTrial | None
    """None where no trial has come to its end."""
    curve: list[float | None]
    """The best value after 1, 2, … trials."""
    importance: dict[str, float]
    """How much each setting mattered, parts of 1; empty of too few trials."""


class TuningRecord(TypedDict):
    """How the settings of a comparison were chosen: the same budget for every norm."""

    num_trials: int
    """Of each norm."""
    select_by: Goal
    """The value of the valid split by which trials are judged."""
    seed: int
    """Of the runs of all trials, and of the sampler; none of the comparison's."""
    sampler: str
    pruner: str | None
    """The rule by which trials are given up early; None where none is."""
    norms: dict[str, NormTuning]


class FunctionRecord(TypedDict):
    """The training function of a user that a comparison ran."""

    name: str
    """`module:name`."""
    file: str | None
    """Where it is written; None for a function without a file, as of a notebook."""
    sha256: str | None
    """Of that file."""


class Baseline(TypedDict):
    """A model without a network over the same vocabulary: what every norm has to beat."""

    name: str
    """Of the built-in tasks `unigram`, `bigram`, `trigram`, `word`, `copy`, `attach` or
    `naive_bayes`: `copy` leaves the source as it is, `attach` hangs every word from its neighbor,
    `naive_bayes` counts the words of each class."""
    metrics: dict[str, float | None]


class RaceSettings(TypedDict):
    """How the norms of a comparison race."""

    confidence: float
    """With which the best norm is not dropped."""
    margin: float | None
    """Differences that are smaller do not matter."""


@dataclass(frozen=True, kw_only=True)
class ComparisonHead:
    """The contents of `comparison.json`: what is compared, as `results.json` says it, too."""

    format: Literal[2]
    task: str
    """Name of a built-in task, or `module:name` of an own one."""
    function: FunctionRecord | None = None
    """Of own functions only."""
    preset: str = ""
    """Size of the experiment; empty for an own function."""
    placement: Placement | None = None
    """None for an own function."""
    settings: dict[str, Any]
    """The whole configuration with `norms` and `seeds` in their order, plus `versions`, `machine`
    and `date` of the comparison."""
    score: Goal | None = None
    """What `valid_score` in metrics.csv is, such as `valid_bleu`, and which way it is better;
    None where no validation tells it."""
    study: StudyInfo | None = None
    """What the variants are about; None where norms as such are compared."""
    paper: list[PaperRecord] = field(default_factory=list)
    """What the papers print for this recipe, also for norms that were not run."""
    paper_statistics: list[PaperStatistic] = field(default_factory=list)
    """And what they print of the statistics of its norms."""
    reduced: str = ""
    """What has to be known beside a paper's numbers, in words: for which preset it stands, whether
    the data are the paper's, and what a remark of its runs means. Empty where nothing has."""
    changes: ChangesRecord | None = None
    """None where every setting is the preset's."""
    tuning: TuningRecord | None = None
    """How the settings of each norm were chosen; None where nobody tuned them."""
    goal: Goal
    race: RaceSettings | None = None
    """None where every norm is trained with every seed."""
    data: dict[str, Any] = field(default_factory=dict)
    """Name, source, licence and sizes of the corpus; empty for an own function."""
    baselines: list[Baseline] = field(default_factory=list)
    """Empty where the task has none."""


class SeedStatistics(TypedDict):
    """What the seeds say of a norm, in the comparison's goal; None where they are too few."""

    label: str
    """As the table names the norm."""
    seeds: int
    """That finished."""
    mean: float
    mean_interval: list[float] | None
    """Both ends of the 95 % bootstrap interval over seeds."""
    interquartile_mean: float
    interquartile_mean_interval: list[float] | None
    against: NotRequired[str]
    """The norm that it is held against, seed by seed; absent, with what follows, of that norm, and
    where no seed finished with both."""
    difference: NotRequired[float]
    difference_interval: NotRequired[list[float] | None]
    """By Student's t."""
    p: NotRequired[float | None]
    """Of the two-sided paired t-test."""
    p_holm: NotRequired[float | None]
    """The same, corrected for the number of norms."""
    seeds_needed: NotRequired[int | None]
    """By which the test shows a gap of this size and scatter with a chance of 80 %; None also where
    1,000 are too few."""


RaceOutcome = Literal["one left", "level", "undecided", "open"]
"""`level`: the norms that are left differ by less than the margin; `undecided`: all seeds were
used; `open`: runs are missing."""


class DropRecord(TypedDict):
    """A norm that is out of a race."""

    label: str
    after: int
    """Seeds that were trained with it."""
    behind: str
    """The norm that led."""
    difference: float | None
    """How much worse, mean over the seeds that finished with both, in the race's metric and its
    direction; None where it was dropped because its runs were lost."""
    at_least: float | None
    """How much worse by the lower confidence bound."""
    seeds: int
    """That finished with both."""


class RaceRecord(TypedDict):
    """What a race came to."""

    metric: str
    """By which it was decided."""
    leader: str | None
    """The best of those that are left; None before the first seed."""
    left: list[str]
    """Norms that were not dropped."""
    dropped: list[DropRecord]
    outcome: RaceOutcome
    rounds: int
    """Seeds that all norms that were left by then have ended."""


@dataclass(frozen=True, kw_only=True)
class ComparisonResults(ComparisonHead):
    """The contents of `results.json`."""

    standing: RaceRecord | None = None
    """What the race has come to; None without one, and of parts of several."""
    runs: Sequence[RunResult]
    """In the order of the lines and seeds."""
    statistics: list[SeedStatistics] | None = None
    """Written when a comparison has ended."""


def placement_words(placement: str) -> str:
    """Where the norms stand, in words.

    >>> placement_words("pre"), placement_words("peri")
    ('pre-norm', 'placement peri')
    """
    return f"{placement}-norm" if placement in ("pre", "post") else f"placement {placement}"


def run_name(norm: str, placement: str | None, seed: int) -> str:
    """The folder name of a run.

    The colon of `module:Class`, which not every file system takes, becomes a plus, which no name of
    a norm has.

    Args:
        norm: short name, or label of a variant.
        placement: where the norms stand; None for an own function.
        seed: of the run.

    >>> run_name("pn", "pre", 1), run_name("pn", None, 1)
    ('pn-pre-seed1', 'pn-seed1')
    >>> run_name("my.module:MyNorm", "pre", 1)
    'my.module+MyNorm-pre-seed1'
    """
    place = "" if placement is None else f"-{placement}"
    return f"{norm.replace(':', '+')}{place}-seed{seed}"
