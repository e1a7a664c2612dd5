"""`powernorm diagnose`: a run of `compare`, one of its checkpoints or a pretrained model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from powernorm.data.readers import load_corpus
from powernorm.diagnosis import Diagnosis
from powernorm.errors import InputError
from powernorm.integrations.pretrained import diagnose_pretrained, is_pretrained
from powernorm.report.diagnosis_page import write_diagnosis_page
from powernorm.report.diagnosis_words import evaluation_words
from powernorm.runs import DIAGNOSIS_FILE
from powernorm.training.run_diagnosis import diagnose_run

PAGE: Final = "diagnosis.html"
_PASSES: Final = 2
_TEXT: Final = "rt"
"""For a pretrained model: sentences, documents of a length that a batch is made of."""


@dataclass(frozen=True)
class Source:
    """What is diagnosed, and on what."""

    path: Path
    """A run's folder, one of its checkpoints, or a folder in Hugging Face's layout."""
    data: str | None
    num_batches: int
    sequences: int | None
    """In a batch of a pretrained model; a run has its own."""
    length: int | None

    @property
    def is_whole_run(self) -> bool:
        """Whether it is a run's best checkpoint on its own text: its folder keeps what is found."""
        return self.path.is_dir() and self.data is None and not is_pretrained(self.path)

    def diagnose(self, on_progress: Callable[[int, int], None]) -> Diagnosis:
        """Load, and look.

        Raises:
            InputError: nothing that could be loaded, or options that it does not take.
        """
        if is_pretrained(self.path):
            return diagnose_pretrained(
                self.path,
                load_corpus(self.data or _TEXT).documents["train"],
                num_batches=self.num_batches,
                batch_size=self.sequences or 32,
                length=self.length or 128,
                on_progress=on_progress,
            )
        if self.sequences is not None or self.length is not None:
            raise InputError(
                f"{self.path} is a run, which has batches of its own: leave out --sequences and "
                "--length, which are for a folder with a Hugging Face model"
            )
        return diagnose_run(
            self.path, data=self.data, num_batches=self.num_batches, on_progress=on_progress
        )


def diagnose_and_print(source: Source, out: Path | None, csv: Path | None) -> None:
    """Diagnose, print the table and the verdict, then write what was found.

    Args:
        source: what to look at.
        out: the page; None is `diagnosis.html` in the folder of a run, no page for others.
        csv: the table of layers.

    Raises:
        InputError: nothing that could be diagnosed, or a file that cannot be written.
    """
    if source.is_whole_run:
        out = out or source.path / PAGE
    for target in (out, csv):
        _check_target(target)
    with _bar() as progress:
        task = progress.add_task("diagnosing", total=_PASSES * source.num_batches)
        report = source.diagnose(lambda done, _: progress.update(task, completed=done))
    typer.echo(str(report))
    words = evaluation_words(report.to_json()["evaluation"])
    if words:
        typer.echo(words)
    if source.is_whole_run:
        report.write_json(source.path / DIAGNOSIS_FILE)
        typer.echo(f"written: {source.path / DIAGNOSIS_FILE}")
    if csv is not None:
        report.write_csv(csv)
        typer.echo(f"written: {csv}")
    if out is not None:
        typer.echo(f"report: {write_diagnosis_page(report.to_json(), out)}")


def _check_target(target: Path | None) -> None:
    """Before the minutes that it takes, not after."""
    if target is None:
        return
    if target.is_dir():
        raise InputError(f"{target} is a folder: give the name of a file")
    if not target.resolve().parent.is_dir():
        raise InputError(f"{target} cannot be written: {target.resolve().parent} is no folder")


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
