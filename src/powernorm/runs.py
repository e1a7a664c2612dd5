"""The run folder: the names of its files and the types of their rows.

Training writes run folders and the report reads them; this module is all that the two share.

```
COMPARISON/                 one folder a comparison
  results.json              ComparisonResults: settings, baselines, one RunResult a run
  report.html               self-contained report
  RUN/                      one folder a run, named by `run_name`
    config.json             the full configuration of the run
    metrics.csv             one row a logged step (METRICS_COLUMNS; empty cells where not logged)
    norms.csv               one row a batch-statistics layer and monitored step (NORMS_COLUMNS)
    result.json             RunResult, written when the run has ended
    checkpoints/            last.ckpt, best.ckpt
    tensorboard/            event files
```
"""

from typing import Any, Final, Literal, NotRequired, TypedDict

RESULTS_FILE: Final = "results.json"
REPORT_FILE: Final = "report.html"
CONFIG_FILE: Final = "config.json"
METRICS_FILE: Final = "metrics.csv"
NORMS_FILE: Final = "norms.csv"
RESULT_FILE: Final = "result.json"
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
)
"""Losses are in nats per token, perplexities per word, seconds since the start of the run."""

NORMS_COLUMNS: Final = (
    "step",
    "layer",
    "norm",
    "mean_tid",
    "var_tid",
    "mean_distance",
    "var_distance",
    "num_nonfinite_batches",
)
"""Online TID of SPEC 5 as fractions; distances are (1/d)·‖batch - running‖ (Shen et al., Fig. 2).

A norm that does not centre (PowerNorm, MABN) has empty mean columns; its var columns hold the
quadratic mean.
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


class Baseline(TypedDict):
    """A model without a network over the same subwords: what every norm has to beat."""

    name: Literal["unigram", "bigram"]
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


def run_name(norm: str, placement: str, seed: int) -> str:
    """The folder name of a run.

    >>> run_name("pn", "pre", 1)
    'pn-pre-seed1'
    """
    return f"{norm}-{placement}-seed{seed}"
