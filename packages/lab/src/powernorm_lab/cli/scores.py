"""`powernorm diagnose --scores`: scores with running, re-estimated and batch statistics."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from powernorm.cli.launching import INTERRUPTED
from powernorm.cli.progress import progress_bar
from powernorm.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

    from powernorm_lab.diagnosing import Look

_SPLITS: Final = ("test", "valid")


def scoring_bar(progress: "Progress", scores: str | None) -> Callable[[int, int], None] | None:
    """Add a progress bar for the kinds of statistics; return its callback, or None without one."""
    if scores is None:
        return None
    task = progress.add_task(f"scoring the {scores} split", total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)


def check_split(scores: str | None) -> str | None:
    """Return the split after checking that it can be scored.

    Raises:
        InputError: it cannot be scored.
    """
    if scores is not None and scores not in _SPLITS:
        raise InputError(f"--scores {scores!r} is not known: give {' or '.join(_SPLITS)}")
    return scores


def scored_folder(folder: Path, look: "Look", targets: tuple[Path | None, ...]) -> bool:
    """Score all runs of a comparison or of comparisons in a folder, and print the paper's tables.

    Args:
        folder: folder of the comparison.
        look: options of the diagnosis, with the split.
        targets: files of a single run, which must not be given.

    Returns:
        False if the folder has no comparison, so that nothing was done.

    Raises:
        InputError: an option is for a single run only, or no run can be scored.
    """
    from powernorm_lab.diagnosed_runs import comparisons_in, score_runs

    comparisons = comparisons_in(folder)
    if not comparisons:
        return False
    if any(value is not None for value in (*targets, look.data)):
        raise InputError(
            f"{folder} contains several runs, and each stores its own diagnosis: leave out --data, "
            "--out, --csv and --figures"
        )
    from rich.console import Console

    from powernorm_lab.report import print_scores, read_comparison

    try:
        with progress_bar() as progress:
            score_runs(
                comparisons,
                look.scores or "test",
                num_batches=look.num_batches,
                device=look.device,
                on_run=lambda run, what: progress.console.print(f"{run}: {what}", markup=False),
                on_scored=scoring_bar(progress, look.scores),
            )
    except KeyboardInterrupt:
        typer.echo("interrupted: the runs that were scored keep their scores", err=True)
        raise typer.Exit(INTERRUPTED) from None
    print_scores(Console(), [read_comparison(path) for path in comparisons])
    named = " ".join(map(str, comparisons))
    typer.echo(f"with the diagnosis of each run: powernorm report {named}")
    return True
