"""Format of run folders: names of their files and types of their rows.

Training writes run folders and the report reads them. They share only this module and
`powernorm.records`.

```
COMPARISON/                 one folder per comparison
  comparison.json           ComparisonHead: settings and data, written before the first run
  results.json              ComparisonResults: settings, baselines, one RunResult per run
  work.json                 instructions for other processes to train the remaining runs
  workers/                  output of the workers of `--jobs`
  report.html               self-contained report
  tuning.json               TuningRecord of `powernorm tune`: how the settings were chosen
  trials.csv                one row per trial (TRIALS_COLUMNS, then the settings by dotted key)
  trials/                   comparison folder of the trials
  optuna.db                 trials in Optuna's storage
  RUN/                      one folder per run, named by `run_name`
    config.json             full configuration of the run
    metrics.csv             one row per logged step (METRICS_COLUMNS, with empty cells for values
                            that were not logged; then the run's own columns)
    norms.csv               one row per norm and monitored step (NORMS_COLUMNS)
    result.json             RunResult, written when the run has ended
    scales.json             ScalesRecord, with `training.record_scales`
    diagnosis.json          DiagnosisRecord, written by `powernorm diagnose`
    diagnoses.jsonl         one DiagnosisRecord per line, in the order of the steps, with
                            `training.diagnose_every`
    translations.tsv        source, reference, translation of the test split (task translation)
    checkpoints/            last.ckpt, best.ckpt; early.ckpt with `training.early_checkpoint`;
                            step-N.safetensors (weights of the last validations) and
                            average.safetensors with `training.average_checkpoints`
    tensorboard/            event files
```

All JSON files except those of diagnoses end with their checksum, `powernorm.json_reading.SEAL`.

`powernorm_lab.schema` reads and writes the dataclasses, such as RunResult: a field without a
default is always in the file, one with a default only if it has another value. Their fields have
the order of the files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, get_args

from typing_extensions import TypedDict  # which pydantic reads in Python 3.11, too

from powernorm.records import (
    CONFIG_FILE,
    MODEL_FILE,
    TID,
    PaperStatistic,
    Placement,
    ScaleRecord,
)

PLACEMENTS: Final[tuple[Placement, ...]] = get_args(Placement)

TASKS: Final = ("lm", "translation", "classify", "ner", "parse", "image", "lm-char", "sequences")
"""Names of the built-in tasks in the order of lists; kept here so that the help imports little."""

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
"""Columns of trials.csv: `value` is the selection metric of a completed trial, `trial` Optuna's
number, from 0."""
METRICS_FILE: Final = "metrics.csv"
NORMS_FILE: Final = "norms.csv"
RESULT_FILE: Final = "result.json"
DIAGNOSIS_FILE: Final = "diagnosis.json"
DIAGNOSES_FILE: Final = "diagnoses.jsonl"
DIAGNOSIS_PAGE: Final = "diagnosis.html"
SCALES_FILE: Final = "scales.json"
SUBWORDS_FILE: Final = "subwords.json"
"""Vocabulary of a run's translation model."""
REMOVAL_FILE: Final = "removal.json"
TRANSLATIONS_FILE: Final = "translations.tsv"
TRANSLATIONS_COLUMNS: Final = ("source", "reference", "translation")
BEST_SCORED: Final = "best checkpoint"
"""Beginning of `RunResult.scored` if the best checkpoint is scored."""
LAST_SCORED: Final = "last checkpoint"
AVERAGE_SCORED: Final = "average of the last"
CHECKPOINTS_FOLDER: Final = "checkpoints"


def is_run_folder(path: Path) -> bool:
    """Return whether a folder belongs to a run, finished or not.

    A model of another library has a config.json, too, but another folder name.
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

The gap columns are losses on a few validation batches, with running statistics and with those of
each batch (see `powernorm.diagnosis.evaluation_gap`); empty for norms without batch statistics.
`valid_score` is the task's own measure on the valid split, or on a sample of it; `score` in
results.json names it.
"""


Status = Literal[
    "finished", "diverged", "nonfinite", "interrupted", "failed", "dropped", "pruned", "unfinished"
]
"""Status of a run.

`diverged`: in a built-in task, the loss rose above the first baseline (the unigram) for good; in a
user's function, the goal is worse than the first baseline's, or the function says so;
`nonfinite`: the loss became NaN or infinite; `interrupted`: stopped by the user, `--resume`
continues it; `failed`: an exception; `dropped`: not trained, or not to the end, because the race
was decided; `pruned`: a trial of a tuning that was worse than earlier ones; `unfinished`: still in
progress or killed, without a result.
"""

LOST: Final[frozenset[Status]] = frozenset({"diverged", "nonfinite"})
"""Statuses of runs that diverged or became NaN."""
OVER: Final[frozenset[Status]] = LOST | {"finished", "pruned"}
"""Statuses of runs that `resume` does not train again."""


class ScalesRecord(TypedDict):
    """Contents of `scales.json`."""

    format: Literal[1]
    layers: list[ScaleRecord]


class StudyInfo(TypedDict):
    """Description of a study for its figure."""

    name: str
    title: str
    x_label: str
    """Label of the x axis; empty if the variants have no `x`."""
    logarithmic: bool
    """Whether the x axis is logarithmic."""
    source: str
    """Figure or table of a paper that it repeats."""
    y_label: NotRequired[str]
    """Label of the second axis of a grid."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a run."""

    norm: str
    seed: int
    placement: Placement | None = None
    """None for a user's function."""
    status: Status
    metrics: dict[str, float | None]
    """`valid_perplexity`, `test_perplexity` (per word; in translation per subword), `valid_loss`,
    `test_loss` (nats/token); in translation also TRANSLATION_METRICS, in other tasks their scores
    (such as `test_accuracy`, in percent). For a user's function the returned metrics, under any
    names; None for a number that is not finite."""
    tid: TID | None
    seconds: float
    """Training time; 0 for a run that was not trained to the end."""
    tokens_per_second: float | None
    parameters: int | None
    """Number of parameters; None if the run does not know its model."""
    folder: str
    """Folder of the run, relative to the comparison's."""
    label: str = ""
    """Name of the variant in a study; empty if the norm's short name is the name."""
    x: float | None = None
    """Position of the variant on the study's axis."""
    y: float | None = None
    """Position on the second axis of a grid."""
    remark: str = ""
    """Caveat displayed next to every number of the run, such as `sees the future`."""
    examples_per_second: float | None = None
    """Training throughput in rows, such as images, for tasks in which tokens say little."""
    scored: str = ""
    """Weights that were scored: `best checkpoint`, `best checkpoint by valid_accuracy` if that
    selected it instead of the loss, or `average of the last N checkpoints, running statistics
    recalibrated` (or `averaged`); empty if the run does not say."""
    signatures: dict[str, str] = field(default_factory=dict)
    """Signatures of sacrebleu by names of TRANSLATION_METRICS."""
    message: str = ""
    """Reason of a failure, or place of a stop."""
    ran_on: dict[str, str | int] = field(default_factory=dict)
    """`host`, `worker` and `gpu` of the worker that trained or ended it; empty if `compare` itself
    trained it."""
    study: StudyInfo | None = None
    """Study of the variant; only in the run's own file, in case `results.json` is lost."""

    @classmethod
    def empty(cls, **known: Any) -> "RunResult":
        """Return the result of a run that was not trained to the end."""
        known |= {"metrics": {}, "seconds": 0.0}
        return cls(tid=None, tokens_per_second=None, parameters=None, **known)

    @property
    def name(self) -> str:
        """Label of the variant, or the norm's short name."""
        return self.label or self.norm


TRANSLATION_METRICS: Final = (
    "test_bleu",
    "test_bleu_tokenised",
    "test_bleu_lowercase",
    "test_chrf",
    "decoding_tokens_per_second",
)
"""Corpus scores of the translations of the test split, 0 to 100: detokenized, cased BLEU; BLEU of
Moses tokens, cased; the same in lower case; chrF. The last is the number of target subwords that
the search generates per second, end marks included. Optional: `test_bleu_compound`, BLEU of Moses
tokens, cased, with compounds split at their dashes.
"""


class PaperRecord(TypedDict):
    """Published result that is shown next to ours."""

    norm: str
    """Short name, or the label of a variant."""
    placement: Placement
    dataset: str
    metric: str
    """Name of the run metric, such as `test_bleu_tokenised`."""
    value: float | None
    """None if the training diverged according to the paper; a BLEU of 0 is a failed training."""
    source: str
    """Paper and table."""
    against: NotRequired[list[str]]
    """Norms that the paper compares this one with; if absent, LayerNorm."""


class ChangeRecord(TypedDict):
    """Setting that differs from a preset."""

    here: NotRequired[Any]
    """Value in the comparison; absent if that is the default."""
    preset: NotRequired[Any]
    """Value in the preset; absent if that is the default."""


class ChangesRecord(TypedDict):
    """Settings of a comparison that differ from its reference preset."""

    preset: str
    """Name of the reference: the paper's experiment, or the comparison's own preset."""
    settings: dict[str, ChangeRecord]
    """Changed settings by dotted key, as for `--set`; only those that affect the results."""


class Goal(TypedDict):
    """Main metric of a comparison."""

    metric: str
    """Name of the run metric."""
    direction: Literal["min", "max"]
    """Better direction."""


class ChosenTrial(TypedDict):
    """Best trial of a norm."""

    trial: int
    """Number of the trial, from 0."""
    value: float
    """Selection metric on the valid split."""
    settings: dict[str, Any]
    """Settings by dotted key."""


class NormTuning(TypedDict):
    """Tuning of one norm's settings."""

    search: dict[str, str]
    """Ranges by dotted key, as for `--search`."""
    trials: dict[str, int]
    """Number of trials by status; all of them count."""
    untuned: float | None
    """Value of the first trial, which has the recipe's settings."""
    best: ChosenTrial | None
    """None if no trial was completed."""
    curve: list[float | None]
    """Best value after 1, 2, … trials."""
    importance: dict[str, float]
    """Importance of each setting, with a sum of 1; empty for too few trials."""


class TuningRecord(TypedDict):
    """Tuning of a comparison's settings with the same budget for every norm."""

    num_trials: int
    """Number of trials per norm."""
    select_by: Goal
    """Selection metric of the trials, on the valid split."""
    seed: int
    """Seed of all trials and of the sampler; not one of the comparison's."""
    sampler: str
    pruner: str | None
    """Rule that stops trials early; None without one."""
    norms: dict[str, NormTuning]


class FunctionRecord(TypedDict):
    """User's training function of a comparison."""

    name: str
    """`module:name`."""
    file: str | None
    """Source file; None for a function without a file, such as in a notebook."""
    sha256: str | None
    """Checksum of the file, or of the function's code in a notebook; None if it is not known."""


class Baseline(TypedDict):
    """Simple model over the same vocabulary, without a network, that every norm should beat."""

    name: str
    """In built-in tasks `unigram`, `bigram`, `trigram`, `word`, `copy`, `attach` or `naive_bayes`:
    `copy` outputs the source unchanged, `attach` makes every word depend on its neighbor,
    `naive_bayes` counts the words of each class."""
    metrics: dict[str, float | None]


class RaceSettings(TypedDict):
    """Settings of a race between norms."""

    confidence: float
    """Probability that the best norm is not dropped."""
    margin: float | None
    """Largest difference that does not matter."""


@dataclass(frozen=True, kw_only=True)
class ComparisonHead:
    """Contents of `comparison.json`, which are also in `results.json`."""

    format: Literal[2]
    task: str
    """Name of a built-in task, or `module:name` of a user's."""
    function: FunctionRecord | None = None
    """User's training function; None for a built-in task."""
    preset: str = ""
    """Size of the experiment; empty for a user's function."""
    placement: Placement | None = None
    """None for a user's function."""
    settings: dict[str, Any]
    """Whole configuration with `norms` and `seeds` in their order, plus `versions`, `machine` and
    `date` of the comparison."""
    score: Goal | None = None
    """Meaning of `valid_score` in metrics.csv, such as `valid_bleu`, and its better direction; None
    if validations have no score."""
    study: StudyInfo | None = None
    """Study of the variants; None if plain norms are compared."""
    paper: list[PaperRecord] = field(default_factory=list)
    """Published results for this recipe, also for norms that were not run."""
    paper_statistics: list[PaperStatistic] = field(default_factory=list)
    """Published statistics of the recipe's norms."""
    reduced: str = ""
    """Caveat displayed next to the published results: the full preset of a reduced one, whether the
    data are the paper's, and the meaning of a run's remark. Empty without one."""
    changes: ChangesRecord | None = None
    """None if every setting is the preset's."""
    tuning: TuningRecord | None = None
    """Tuning of each norm's settings; None without one."""
    goal: Goal
    race: RaceSettings | None = None
    """None if every norm is trained with every seed."""
    data: dict[str, Any] = field(default_factory=dict)
    """Name, source, licence and sizes of the corpus; empty for a user's function."""
    baselines: list[Baseline] = field(default_factory=list)
    """Empty if the task has none."""


class SeedStatistics(TypedDict):
    """Statistics of a norm's goal over seeds; values are None if the seeds are too few."""

    label: str
    """Name of the norm in the table."""
    seeds: int
    """Number of finished seeds."""
    mean: float
    mean_interval: list[float] | None
    """Both ends of the 95 % bootstrap interval over seeds."""
    interquartile_mean: float
    interquartile_mean_interval: list[float] | None
    against: NotRequired[str]
    """Reference norm of the paired test. This and the following keys are absent for the reference
    itself, and if no seed finished with both."""
    difference: NotRequired[float]
    difference_interval: NotRequired[list[float] | None]
    """Interval by Student's t."""
    p: NotRequired[float | None]
    """p-value of the two-sided paired t-test."""
    p_holm: NotRequired[float | None]
    """p-value corrected for the number of norms by Holm's method."""
    seeds_needed: NotRequired[int | None]
    """Seeds for which the test detects a gap of this size and spread with a power of 80 %; None
    also if 1,000 are too few."""


RaceOutcome = Literal["one left", "level", "undecided", "open"]
"""Outcome of a race. `level`: the remaining norms differ by less than the margin; `undecided`: all
seeds were used; `open`: runs are missing."""


class DropRecord(TypedDict):
    """Norm that was dropped from a race."""

    label: str
    after: int
    """Number of seeds that were trained with it."""
    behind: str
    """Norm that was leading."""
    difference: float | None
    """Mean of how much worse it is over the seeds that finished with both norms, in the race's
    metric and direction; None if it was dropped because its runs were lost."""
    at_least: float | None
    """Lower confidence bound of the difference."""
    seeds: int
    """Number of seeds that finished with both norms."""


class RaceRecord(TypedDict):
    """Result of a race."""

    metric: str
    """Metric that decides it."""
    leader: str | None
    """Best remaining norm; None before the first seed."""
    left: list[str]
    """Norms that were not dropped."""
    dropped: list[DropRecord]
    outcome: RaceOutcome
    rounds: int
    """Number of seeds that all norms remaining at the time have completed."""


@dataclass(frozen=True, kw_only=True)
class ComparisonResults(ComparisonHead):
    """Contents of `results.json`."""

    standing: RaceRecord | None = None
    """Result of the race so far; None without a race, and for parts of several comparisons."""
    runs: Sequence[RunResult]
    """Results in the order of the lines and seeds."""
    statistics: list[SeedStatistics] | None = None
    """Statistics over seeds, written when a comparison has ended."""


def placement_words(placement: str) -> str:
    """Return the placement of the norms in words.

    >>> placement_words("pre"), placement_words("peri")
    ('pre-norm', 'placement peri')
    """
    return f"{placement}-norm" if placement in ("pre", "post") else f"placement {placement}"


def run_name(norm: str, placement: str | None, seed: int) -> str:
    """Return the folder name of a run.

    The colon of `module:Class`, which some file systems do not allow, becomes a plus, which occurs
    in no name of a norm.

    Args:
        norm: short name, or label of a variant.
        placement: placement of the norms; None for a user's function.
        seed: seed of the run.

    >>> run_name("pn", "pre", 1), run_name("pn", None, 1)
    ('pn-pre-seed1', 'pn-seed1')
    >>> run_name("my.module:MyNorm", "pre", 1)
    'my.module+MyNorm-pre-seed1'
    """
    place = "" if placement is None else f"-{placement}"
    return f"{norm.replace(':', '+')}{place}-seed{seed}"
