"""`powernorm diagnose`: check whether batch statistics work in a model, or compare several."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, cast

import typer

from powernorm.cli.diagnose import (
    PASSES,
    Batches,
    Csv,
    DeviceName,
    bar_of,
    check_target,
    diagnosed,
    diagnosed_own,
    write_table,
)
from powernorm.cli.launching import INTERRUPTED
from powernorm.cli.options import TrustCode, Wide
from powernorm.cli.progress import progress_bar
from powernorm.errors import InputError, printable
from powernorm_lab.cli.options import FigureFormats, Figures, saving_figures

if TYPE_CHECKING:
    from rich.progress import Progress

    from powernorm.diagnosis import Diagnosis
    from powernorm.inspection.batches import Progress as OnProgress
    from powernorm_lab.data.corpus import EvaluatedSplit
    from powernorm_lab.diagnosing import Look, Overlay

_OVERLAY_PAGE: Final = "overlay.html"
_SPLITS: Final = ("test", "valid")


def diagnose(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help="Folder of a run (its scored weights), one of its checkpoints, a folder with a "
            "Hugging Face model, or module:name of (model, batches) or of a function that returns "
            "them. With --overlay several, and folders of comparisons for all of their runs.",
        ),
    ],
    overlay: Annotated[
        bool,
        typer.Option(
            "--overlay",
            help="Write one page for all models with a line per norm: by layer, and over the "
            "training if training.diagnose_every recorded it. Runs without a diagnosis.json of "
            "the same batches are diagnosed first.",
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Text that replaces the run's, as for `compare --data`."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Path of the page; default for a run: RUN/diagnosis.html, with --overlay: "
            "overlay.html in the folder that contains all runs.",
        ),
    ] = None,
    csv: Csv = None,
    figures: Figures = None,
    formats: FigureFormats = None,
    batches: Batches = 50,
    device: DeviceName = "auto",
    sequences: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="For a Hugging Face model: rows in a batch (32)."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="For a Hugging Face model: tokens in a row (128)."),
    ] = None,
    scores: Annotated[
        str | None,
        typer.Option(
            metavar="test|valid",
            help="For a run, or all runs of a folder: score this split by the task's metric (BLEU, "
            "accuracy, …) with running, re-estimated and batch statistics of several sizes. Reads "
            "or translates the split up to nine times per run.",
        ),
    ] = None,
    wide: Wide = False,
    trust_code: TrustCode = False,
) -> None:
    """Check layer by layer whether batch statistics (would) work in a trained model.

    In Python, for any model: powernorm.diagnose(model, batches).
    """
    from powernorm.inspection.devices import checked_device
    from powernorm.integrations.model_sources import check_folder, is_named
    from powernorm.norms import named_layers
    from powernorm_lab.diagnosing import Look, is_run
    from powernorm_lab.runs import DIAGNOSIS_PAGE

    named_layers.trust_code(trust_code)
    if batches < PASSES:
        raise InputError(f"num_batches is {batches}, expected at least 2: TID compares batches")
    place = checked_device(device)
    split = cast("EvaluatedSplit | None", _check_split(scores))
    look = Look(batches, data, sequences, length, place, split)
    if len(sources) == 1 and is_named(sources[0]) and not overlay:
        look.check_own(sources[0])
        of_one = partial(diagnosed_own, sources[0], batches, place)
        _check_page(figures, out)
        with saving_figures(figures, formats):
            _diagnose_one(of_one, None, out, csv, wide=wide)
        return
    if len(sources) > 1 and not overlay:
        raise InputError(
            f"{len(sources)} models are given: add --overlay for one page of all, or give them "
            "one at a time"
        )
    for source in sources:
        if not is_named(source):
            check_folder(Path(source))
    if overlay:
        with saving_figures(figures, formats):
            _diagnose_together(sources, look, out or _overlay_page(sources), csv, wide=wide)
        return
    (source,) = sources
    if split and _scored_folder(Path(source), look, (out, csv, figures)):
        return
    _check_one_run(source)
    keeps_it = is_run(Path(source)) and data is None
    if keeps_it:
        out = out or Path(source) / DIAGNOSIS_PAGE
    _check_page(figures, out)
    of_one = partial(_diagnosed_source, source, look)
    with saving_figures(figures, formats):
        _diagnose_one(of_one, Path(source) if keeps_it else None, out, csv, wide=wide)


def _check_one_run(source: str) -> None:
    """Check that a folder does not contain the runs of a comparison.

    Raises:
        InputError: it contains runs.
    """
    from powernorm_lab.diagnosing import runs_in

    runs = runs_in(Path(source))
    if runs:
        raise InputError(
            f"{source} contains {len(runs)} runs: add --overlay for one page of all, or give one "
            f"run, such as {runs[0]}"
        )


# One ---------------------------------------------------------------------------------------------


def _diagnose_one(
    of_one: "Callable[[Progress], Diagnosis]",
    run: Path | None,
    out: Path | None,
    csv: Path | None,
    *,
    wide: bool,
) -> None:
    for target in (out, csv):
        check_target(target)
    _print_diagnosis(diagnosed(of_one, wide=wide), run, out, csv)


def _diagnosed_source(source: str, look: "Look", progress: "Progress") -> "Diagnosis":
    from powernorm_lab.diagnosing import diagnose_source

    moved = bar_of(progress, look.num_batches)
    return diagnose_source(source, look, moved, _scoring_bar(progress, look.scores))


def _print_diagnosis(
    report: "Diagnosis", run: Path | None, out: Path | None, csv: Path | None
) -> None:
    """Print the evaluation and write the requested files.

    Args:
        report: diagnosis of the model.
        run: folder of a run that stores the diagnosis; None to store none.
        out: path of the page.
        csv: path of the table of layers.
    """
    from powernorm_lab.runs import DIAGNOSIS_FILE

    if report.evaluation or report.paper:
        _print_evaluation(report)
    if run is not None:
        report.write_json(run / DIAGNOSIS_FILE)
        typer.echo(f"written: {run / DIAGNOSIS_FILE}")
    write_table(report, csv)
    if out is not None:
        from powernorm_lab.report import write_diagnosis_page

        typer.echo(f"report: {write_diagnosis_page(report.to_json(), out)}")


def _print_evaluation(report: "Diagnosis") -> None:
    """Print losses and scores for each kind of statistics."""
    from rich.console import Console

    from powernorm_lab.report import evaluation_words, print_evaluation

    words = evaluation_words(report.to_json()["evaluation"])
    if words:
        typer.echo(words)
    print_evaluation(Console(), report.to_json())


# Several -----------------------------------------------------------------------------------------


def _diagnose_together(
    sources: Sequence[str], look: "Look", out: Path, csv: Path | None, *, wide: bool
) -> None:
    from powernorm_lab.diagnosing import overlay

    if look.scores is not None:
        raise InputError(
            "--overlay cannot be used with --scores: leave out --scores, or score the runs first"
        )
    for target in (out, csv):
        check_target(target)
    try:
        with progress_bar() as progress:
            task = progress.add_task("diagnosing", total=None)

            def start(name: str, number: int, total: int) -> "OnProgress":
                words = f"diagnosing {name} ({number + 1} of {total})"
                progress.reset(task, description=words, total=PASSES * look.num_batches)
                return lambda done, _: progress.update(task, completed=done)

            found = overlay(sources, look, start)
    except KeyboardInterrupt:
        typer.echo(
            "interrupted: diagnosed runs keep their diagnoses; the same command continues",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    _print_overlay(found, out, csv, wide=wide)


def _print_overlay(found: "Overlay", out: Path, csv: Path | None, *, wide: bool) -> None:
    from rich.console import Console

    from powernorm_lab.report import print_table, write_overlay_page
    from powernorm_lab.report.overlays import overlay_table, write_overlay_csv

    print_table(Console(), overlay_table(found.lines), wide=wide)
    for name, reason in found.left_out.items():
        typer.echo(printable(f"left out: {name}: {reason}"), err=True)
    typer.echo(f"{found.num_diagnosed} diagnosed now, {found.num_known} before")
    if csv is not None:
        write_overlay_csv(found.lines, csv)
        typer.echo(f"written: {csv}")
    typer.echo(f"report: {write_overlay_page(found.lines, out)}")


def _overlay_page(sources: Sequence[str]) -> Path:
    """Return the path of the page, in the folder that contains all runs, else the current one."""
    folders = [Path(source).resolve() for source in sources]
    if all(folder.is_dir() for folder in folders):
        shared = Path(os.path.commonpath(folders))
        here = Path.cwd()
        if shared != Path(shared.anchor):
            shown = shared.relative_to(here) if shared.is_relative_to(here) else shared
            return shown / _OVERLAY_PAGE
    return Path(_OVERLAY_PAGE)


def _check_page(figures: Path | None, out: Path | None) -> None:
    if figures is not None and out is None:
        raise InputError(f"--figures {figures} needs a page: give --out FILE, too")


# Scores ----------------------------------------------------------------------------------------


def _scoring_bar(progress: "Progress", scores: str | None) -> Callable[[int, int], None] | None:
    """Add a progress bar for the kinds of statistics; return its callback, or None without one."""
    if scores is None:
        return None
    task = progress.add_task(f"scoring the {scores} split", total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)


def _check_split(scores: str | None) -> str | None:
    """Return the split after checking that it can be scored.

    Raises:
        InputError: it cannot be scored.
    """
    if scores is not None and scores not in _SPLITS:
        raise InputError(f"--scores {scores!r} is not known: give {' or '.join(_SPLITS)}")
    return scores


def _scored_folder(folder: Path, look: "Look", targets: tuple[Path | None, ...]) -> bool:
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
                on_scored=_scoring_bar(progress, look.scores),
            )
    except KeyboardInterrupt:
        typer.echo("interrupted: the runs that were scored keep their scores", err=True)
        raise typer.Exit(INTERRUPTED) from None
    print_scores(Console(), [read_comparison(path) for path in comparisons])
    named = " ".join(map(str, comparisons))
    typer.echo(f"with the diagnosis of each run: powernorm report {named}")
    return True
