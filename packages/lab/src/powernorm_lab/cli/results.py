"""`powernorm report` and `results`: pages, figures and tables."""

from pathlib import Path
from typing import Annotated

import typer

from powernorm_lab.cli import options


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
    tables: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the tables of the page into this folder, too: Markdown, LaTeX and CSV.",
        ),
    ] = None,
    figures: options.Figures = None,
    formats: options.FigureFormats = None,
    accept_edits: options.AcceptEdits = False,
) -> None:
    """Build report.html again from the run folders alone."""
    from powernorm_lab.report import write_reports, write_tables

    if accept_edits:
        options.accept_edits(*folders)
    if tables is not None:
        for file in write_tables(folders, tables):
            typer.echo(f"table: {file}")
    with options.saving_figures(figures, formats):
        typer.echo(f"report: {write_reports(folders, out)}")


def results(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER…", help="Folders of comparisons, or just of results.json."),
    ],
    accept_edits: options.AcceptEdits = False,
) -> None:
    """Print comparisons beside the papers' numbers, with intervals and a paired test against ln.

    Folders that share their settings but for seeds and norms are parts of one comparison.
    """
    from powernorm_lab.report.results_document import results_document

    if accept_edits:
        options.accept_edits(*folders)
    typer.echo(results_document(folders))
