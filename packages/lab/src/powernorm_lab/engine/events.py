"""Events that a comparison sends to its listener."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from powernorm_lab.runs import METRICS_COLUMNS, Baseline, RunResult


@dataclass(frozen=True, slots=True)
class DataPrepared:
    """The data are read, encoded and counted."""

    name: str
    num_train: int
    unit: str
    """Unit of `num_train`, such as words or texts of the train split."""
    vocabulary_size: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Numbers of left-out examples in `unit`, by reason."""
    baselines: tuple[Baseline, ...] = ()
    units: str = "subwords"
    """Unit of the vocabulary's size."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run starts, or resumes after an interruption."""

    norm: str
    """Short name of the norm, or label of the variant, as in all events."""
    seed: int
    index: int
    """Number of the run, from 1."""
    num_runs: int
    max_steps: int | None
    """Updates of the whole run; None if unknown."""
    first_step: int
    """Updates before the interruption; 0 for a new run."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning that stops nothing."""

    message: str


@dataclass(frozen=True, slots=True)
class StepsDone:
    """Updates were done since the last event."""

    norm: str
    seed: int
    step: int
    train_loss: float
    """Mean over these updates, in nats per token."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run logged values beside its training loss, such as those of an evaluation."""

    norm: str
    seed: int
    step: int
    values: Mapping[str, float | None]
    score: str | None = None
    """Meaning of `valid_score` among the values, such as `accuracy`."""


@dataclass(frozen=True, slots=True)
class RunScored:
    """The training is over, and the run is being scored."""

    norm: str
    seed: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has its result."""

    result: RunResult
    skipped: bool
    """Whether the run had ended before this call."""


Event = DataPrepared | Notice | RunStarted | StepsDone | Measured | RunScored | RunEnded
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Do nothing; the default listener."""
    del event


def logged(
    norm: str, seed: int, step: int, values: Mapping[str, float | None], score: str | None
) -> Iterator[Event]:
    """Yield the events that a row of metrics.csv records.

    Args:
        norm: name of the run's line.
        seed: seed of the run.
        step: step of the row.
        values: values by column; None for empty cells.
        score: meaning of `valid_score`, such as `accuracy`.
    """
    known = {name: value for name, value in values.items() if value is not None}
    if "train_loss" in known:
        yield StepsDone(norm, seed, step, known["train_loss"])
    own = {
        name: value
        for name, value in known.items()
        if name.startswith("valid_") or name not in METRICS_COLUMNS
    }
    if own:
        yield Measured(norm, seed, step, own, score)
