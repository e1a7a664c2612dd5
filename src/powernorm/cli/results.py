"""`powernorm report`, `results`, `fluctuation`, `curves`, `figures`: pages and pictures."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from powernorm.errors import InputError


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS…", help="Folders of comparisons, of single runs, or several."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page; else report.html in the folder, of several in the folder that holds "
            "them all, or in the current one where that is a comparison.",
        ),
    ] = None,
) -> None:
    """Build report.html again from the run folders alone."""
    from powernorm.lab.report import write_reports

    typer.echo(f"report: {write_reports(folders, out)}")


def results(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER…", help="Folders of comparisons, or just of results.json."),
    ],
) -> None:
    """Print comparisons beside the papers' numbers, with intervals and a paired test against ln.

    Folders that share their settings but for seeds and norms are parts of one comparison.
    """
    from powernorm.lab.report.results_document import results_document

    typer.echo(results_document(folders))


def fluctuation(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="NAME=RUN…", help="Runs with batch statistics, each with a name."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The picture, .svg or .png.")] = Path(
        "fluctuation.svg"
    ),
) -> None:
    """Draw how far batch statistics lie from the running ones in models of unlike tasks."""
    from powernorm.lab.report.pictures import draw_fluctuation

    _check_suffix(out)
    named = {}
    for text in runs:
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder:
            raise InputError(
                f"{text!r} is not of the form NAME=RUN, e.g. ResNet-20=runs/a/bn-pre-seed0"
            )
        if name in named:
            raise InputError(f"{name} names two runs: give each a name of its own")
        named[name] = Path(folder)
    typer.echo(f"written: {draw_fluctuation(named, out)}")


def curves(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS…", help="Folder of a comparison, of parts of it, or of runs."),
    ],
    norms: Annotated[
        str,
        typer.Option(metavar="NAME,…", help="Which to draw, as the table names them; else all."),
    ] = "",
    measure: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="Columns of metrics.csv, or the task's score, e.g. valid_loss,valid_bleu; else "
            "the losses, and the score where the runs have it.",
        ),
    ] = "",
    x: Annotated[
        Literal["step", "epoch", "tokens"], typer.Option("--x", help="What they are drawn against.")
    ] = "step",
    out: Annotated[Path, typer.Option(metavar="FILE", help="The picture, .svg or .png.")] = Path(
        "curves.svg"
    ),
) -> None:
    """Draw losses and scores over the training, mean and range of the seeds of each norm."""
    from powernorm.lab.report.pictures import draw_training_curves

    _check_suffix(out)
    chosen, measures = (
        [name.strip() for name in names.split(",") if name.strip()] for names in (norms, measure)
    )
    typer.echo(f"written: {draw_training_curves(folders, out, chosen, measures, x)}")


def figures(
    page: Annotated[
        Path,
        typer.Argument(
            metavar="PAGE",
            help="report.html, diagnosis.html, overlay.html, or a folder with a report.html.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("figures"),
) -> None:
    """Write the figures of a page as SVG files, for a paper or slides."""
    from powernorm.lab.report.figure_files import save_figures

    for file, what in save_figures(page, out).items():
        typer.echo(f"{file}: {what}")


def _check_suffix(out: Path) -> None:
    from powernorm.lab.report.pictures import SUFFIXES

    if out.suffix not in SUFFIXES:
        raise InputError(f"--out {out}: the picture is an .svg or a .png file")
