"""`powernorm compare verdict`: train the settings, diagnose them early, and score the verdicts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from powernorm.errors import InputError
from powernorm.recipes.verdict import TASK, verdict_study


def compare_verdict(
    preset: str,
    folder: Path,
    assignments: Sequence[str],
    *,
    resume: bool,
    force: bool,
    others: Mapping[str, object | None],
) -> None:
    """Do all of it, or go on with it; ends in a table and in the folder's report.html.

    Args:
        preset: of the study.
        folder: where it goes.
        assignments: settings for all comparisons, `key=value`.
        resume: go on with what is there.
        force: delete what is there.
        others: options of `compare` that make no sense here, by name; None where not given.

    Raises:
        InputError: an option that makes no sense, or a setting that cannot be used.
        KeyboardInterrupt: the user stopped it.
    """
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(
            f"`powernorm compare {TASK}` chooses norms, seeds, placement and data itself: leave "
            f"out {', '.join(given)}."
        )
    study = verdict_study(preset, tuple(assignments))
    from rich.console import Console

    # Before the training that takes hours: a missing extra must not show up after it.
    from powernorm.report.verdict import print_verdict, write_verdict_report
    from powernorm.training.progress import ComparisonProgress
    from powernorm.training.verdict_measures import measure_study
    from powernorm.training.verdict_study import train_study

    with ComparisonProgress(Console(stderr=True)) as progress:
        train_study(study, folder, resume=resume, force=force, on_event=progress)
    measure_study(study, folder)
    page = write_verdict_report(folder)
    print_verdict(Console(), folder)
    typer.echo(f"report: {page}")
