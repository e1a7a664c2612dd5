"""Progress of a comparison: bars in a terminal, lines in a file or pipe."""

from contextlib import suppress
from types import TracebackType
from typing import Final, Self, assert_never

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from powernorm.errors import printable
from powernorm_lab.engine.events import (
    DataPrepared,
    Event,
    Measured,
    Notice,
    RunEnded,
    RunScored,
    RunStarted,
    StepsDone,
)
from powernorm_lab.runs import RunResult

SCORES: Final = {
    "test_bleu": "test BLEU",
    "test_accuracy": "test accuracy",
    "test_f1": "test F1",
    "test_uas": "test UAS",
    "test_bits_per_character": "test bits per character",
}
"""Metrics that are shown in place of the perplexity, with their names."""
PERCENTAGES: Final = frozenset({"accuracy", "f1", "uas"})
STYLES: Final = {"finished": "green", "interrupted": "yellow"}


class ComparisonProgress:
    """A listener for `compare`: shows a bar for each current run and a line for each ended run.

    If the console is not a terminal but a file or pipe, each validation prints a line instead.

    Args:
        console: where to show it.

    >>> from io import StringIO
    >>> text = StringIO()
    >>> with ComparisonProgress(Console(file=text)) as progress:
    ...     progress(Measured("pn", 0, 100, {"valid_loss": 4.5, "valid_perplexity": 1234.5}))
    >>> print(text.getvalue().strip())
    pn seed 0: step 100, valid loss 4.500, perplexity 1,234.5
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[tuple[str, int], TaskID] = {}
        """Bars of the current runs, by norm and seed."""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show an event; errors of the output, such as a full disk, do not end the training."""
        with suppress(OSError):
            self._show(event)

    def _show(self, event: Event) -> None:
        match event:
            case DataPrepared():
                self._show_data(event)
            case RunStarted():
                self._begin(event)
            case StepsDone():
                self._advance(event, f"loss {event.train_loss:.3f}")
            case Measured():
                self._show_values(event)
            case Notice():
                self._print(f"[yellow]{escape(event.message)}[/yellow]")
            case RunScored():
                self._show_scoring(event)
            case RunEnded():
                self._end(event)
            case _:
                assert_never(event)

    def _show_data(self, event: DataPrepared) -> None:
        baselines = ", ".join(
            f"{row['name']} {_number(row['metrics']['valid_perplexity'])}"
            for row in event.baselines
            if "valid_perplexity" in row["metrics"]
        )
        left_out = ", ".join(f"{number:,} {reason}" for reason, number in event.left_out.items())
        self._print(
            f"{escape(event.name)}: {event.num_train:,} {event.unit} to train on, "
            + (f"left out {escape(left_out)}, " if left_out else "")
            + f"{event.vocabulary_size:,} {event.units}"
            + (f"; valid perplexity of {baselines}" if baselines else "")
        )

    def _begin(self, event: RunStarted) -> None:
        name = f"[{event.index}/{event.num_runs}] {event.norm} seed {event.seed}"
        resumed = f", from step {event.first_step}" if event.first_step else ""
        if self._console.is_terminal:
            self._remove(event.norm, event.seed)  # a run that resumes after its worker was lost
            self._tasks[event.norm, event.seed] = self._bar.add_task(
                escape(name), total=event.max_steps, completed=event.first_step, note=""
            )
        else:
            steps = "training" if event.max_steps is None else f"{event.max_steps} steps"
            self._print(f"{escape(name)}: {steps}{resumed}")

    def _advance(self, event: StepsDone | Measured, note: str) -> None:
        task = self._tasks.get((event.norm, event.seed))
        if task is not None:
            self._bar.update(task, completed=event.step, note=note, refresh=True)

    def _show_values(self, event: Measured) -> None:
        values, score = event.values, event.values.get("valid_score")
        loss, perplexity = values.get("valid_loss"), values.get("valid_perplexity")
        if loss is None or perplexity is None:
            found = ", ".join(f"{name} {_value(value)}" for name, value in values.items())
        elif event.score is not None and score is not None:
            word = SCORES.get(f"test_{event.score}", event.score).removeprefix("test ")
            found = f"{word} {score:.2f}{' %' if event.score in PERCENTAGES else ''}"
        else:
            found = f"perplexity {_number(perplexity)}"
        if self._console.is_terminal:
            self._advance(event, escape(found if perplexity is None else f"valid {found}"))
            return
        known = "" if loss is None or perplexity is None else f"valid loss {loss:.3f}, "
        line = f"{event.norm} seed {event.seed}: step {event.step}, {known}{found}"
        self._print(escape(line))

    def _show_scoring(self, event: RunScored) -> None:
        task = self._tasks.get((event.norm, event.seed))
        if task is not None:
            self._bar.update(task, note="measuring", refresh=True)
        elif not self._console.is_terminal:
            self._print(f"{escape(event.norm)} seed {event.seed}: measuring")

    def _end(self, event: RunEnded) -> None:
        result = event.result
        self._remove(result.name, result.seed)
        self._print(_summary(result, skipped=event.skipped))

    def _remove(self, norm: str, seed: int) -> None:
        task = self._tasks.pop((norm, seed), None)
        if task is not None:
            self._bar.remove_task(task)
            self._bar.refresh()

    def _print(self, line: str) -> None:
        self._console.print(printable(line), highlight=False, soft_wrap=True)


def _summary(result: RunResult, *, skipped: bool) -> str:
    style = STYLES.get(result.status, "red")
    line = f"{escape(result.name)} seed {result.seed}: [{style}]{result.status}[/{style}]"
    line += f"{_measured(result)}, {result.seconds:.0f} s"
    if result.examples_per_second is not None:
        line += f", {result.examples_per_second:,.0f} examples/s"
    elif result.tokens_per_second is not None:
        line += f", {result.tokens_per_second:,.0f} tokens/s"
    if result.message:
        line += f" ({escape(result.message)})"
    return line + (", from before" if skipped else "")


def _measured(result: RunResult) -> str:
    """Return the first known metric of a run as text."""
    for name, word in SCORES.items():
        value = result.metrics.get(name)
        if value is not None:
            return f", {word} {value:.2f}"
    perplexity = result.metrics.get("test_perplexity")
    return "" if perplexity is None else f", test perplexity {_number(perplexity)}"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
