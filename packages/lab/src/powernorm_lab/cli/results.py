"""`powernorm report` and `results`: write pages, figures and tables."""

from pathlib import Path
from typing import Annotated

import typer

from powernorm_lab.cli import options


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS…", help="Folders of comparisons or single runs."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Path of the page; default: report.html in the folder; for several folders in the "
            "folder that contains them, or in the current one if that is a comparison.",
        ),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write the tables of the page into this folder as Markdown, LaTeX and CSV.",
        ),
    ] = None,
    figures: options.Figures = None,
    formats: options.FigureFormats = None,
    accept_edits: options.AcceptEdits = False,
) -> None:
    """Rebuild report.html from the run folders."""
    from powernorm_lab.report import write_report, write_tables

    if accept_edits:
        options.accept_edits(*folders)
    if tables is not None:
        for file in write_tables(folders, tables):
            typer.echo(f"table: {file}")
    with options.saving_figures(figures, formats):
        typer.echo(f"report: {write_report(folders, out)}")


def results(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER…", help="Folders of comparisons, or with only results.json."
        ),
    ],
    accept_edits: options.AcceptEdits = False,
) -> None:
    """Print comparisons next to published results, with intervals and a paired test against ln.

    Folders whose settings differ only in seeds and norms are parts of one comparison.
    """
    from powernorm_lab.report.results_document import results_document

    if accept_edits:
        options.accept_edits(*folders)
    typer.echo(results_document(folders))
