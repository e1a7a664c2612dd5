"""What a comparison tells whoever watches it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from powernorm_lab.runs import METRICS_COLUMNS, Baseline, RunResult


@dataclass(frozen=True, slots=True)
class DataPrepared:
    """The text is read, encoded and counted."""

    name: str
    num_train: int
    unit: str
    """Words, texts, …: counted in the train split."""
    vocabulary_size: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Of `unit`, by reason."""
    baselines: tuple[Baseline, ...] = ()
    units: str = "subwords"
    """What the vocabulary counts."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A norm and seed begin, or go on after an interruption."""

    norm: str
    """Short name, or the label of the variant; so in all events."""
    seed: int
    index: int
    """From 1."""
    num_runs: int
    max_steps: int | None
    """Updates of the whole run, where they are known."""
    first_step: int
    """Updates that were done before; 0 for a new run."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the user should know, and that stops nothing."""

    message: str


@dataclass(frozen=True, slots=True)
class StepsDone:
    """Some more updates are done."""

    norm: str
    seed: int
    step: int
    train_loss: float
    """Mean over the updates since the last event, nats per token."""


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
    """The training is over; what it came to is measured."""

    norm: str
    seed: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has its result."""

    result: RunResult
    skipped: bool
    """It had ended before and was only read."""


Event = DataPrepared | Notice | RunStarted | StepsDone | Measured | RunScored | RunEnded
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Do nothing: the listener of whoever gives none."""
    del event


def logged(
    norm: str, seed: int, step: int, values: Mapping[str, float | None], score: str | None
) -> Iterator[Event]:
    """Yield the events for which a row of metrics.csv stands.

    Args:
        norm: name of the run's line.
        seed: of the run.
        step: of the row.
        values: by column; None where a cell is empty.
        score: what `valid_score` is.
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
