"""`powernorm results` and `powernorm fluctuation`: pages and pictures of what was measured."""

from pathlib import Path
from typing import Annotated

import typer

from powernorm.errors import InputError

app = typer.Typer()


@app.command()
def results(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER…", help="Folders of comparisons, or just of results.json."),
    ],
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Markdown page whose generated part is replaced; else the text is printed.",
        ),
    ] = None,
) -> None:
    """Put comparisons beside the papers' numbers, with intervals and a paired test against ln."""
    from powernorm.report.results_document import results_document, write_results

    if into is None:
        typer.echo(results_document(folders))
        return
    write_results(folders, into)
    typer.echo(f"written: {into}")


@app.command()
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
    from powernorm.report.fluctuation import draw_fluctuation

    if out.suffix not in (".svg", ".png"):
        raise InputError(f"--out {out}: the picture is an .svg or a .png file.")
    named = {}
    for text in runs:
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder:
            raise InputError(
                f"{text!r} is not of the form NAME=RUN, e.g. ResNet-20=runs/a/bn-pre-seed0."
            )
        if name in named:
            raise InputError(f"{name} names two runs: give each a name of its own.")
        named[name] = Path(folder)
    typer.echo(f"written: {draw_fluctuation(named, out)}")
