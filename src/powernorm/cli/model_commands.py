"""The commands about models that exist. Heavy imports happen inside the command."""

from pathlib import Path
from typing import Annotated

import typer

from powernorm.cli.launching import INTERRUPTED

app = typer.Typer()


@app.command()
def swap(
    source: Annotated[
        str,
        typer.Argument(
            help="module:name of a model or of a function that builds one, or a Hugging Face "
            "config.json."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="NORM", help="Short name, see `powernorm norms`, or module:Class of your own."
        ),
    ] = "rbn",
    names: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="GLOB", help="Names of norms; may be given several times."),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="attention, feed-forward, final, embedding or other."),
    ] = None,
    side: Annotated[
        str | None,
        typer.Option(metavar="encoder|decoder", help="Of a model with both; else the encoder."),
    ] = None,
    lowest: Annotated[
        int | None, typer.Option(metavar="K", help="Only norms inside the K lowest layers.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Option of the norm, e.g. momentum=0.05."),
    ] = None,
) -> None:
    """Show what powernorm.swap would do to a model: each norm, what becomes of it, and why not.

    Nothing is changed; in Python: powernorm.swap(model, to=…).
    """
    from powernorm.cli.surgery import choose, swap_table

    typer.echo(swap_table(source, to, choose(names, role, side, lowest), assignments or []))


@app.command()
def fold(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A run's folder (the weights that were scored) or one of its checkpoints."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the folded model there (….safetensors or ….pt); else only show the table.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Compare with the original model first."),
    ] = True,
    tied: Annotated[
        str,
        typer.Option(
            metavar="untie|keep",
            help="Where embedding and head are one table: give the head its own, or keep one "
            "multiply-add in front of it.",
        ),
    ] = "untie",
) -> None:
    """Fold the norms of a trained model into its weights, so that none is left at inference."""
    from powernorm.cli.surgery import fold_run

    typer.echo(fold_run(checkpoint, out, verify=verify, tied=tied))


@app.command()
def diagnose(
    model: Annotated[
        Path,
        typer.Argument(
            help="A run's folder (the weights that were scored), one of its checkpoints, or a "
            "folder with a Hugging Face model."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Another text than the run's, as `compare --data`."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page; for a run else RUN/diagnosis.html."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table of layers there, too.")
    ] = None,
    batches: Annotated[
        int, typer.Option(min=2, metavar="N", help="Training batches in each pass.")
    ] = 50,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of a Hugging Face model: rows in a batch (32)."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of a Hugging Face model: tokens in a row (128)."),
    ] = None,
) -> None:
    """Say whether batch statistics (would) work in a trained model, layer by layer.

    In Python, for any model: powernorm.diagnose(model, batches).
    """
    from powernorm.cli.diagnosis import Source, diagnose_and_print

    try:
        source = Source(model, data, batches, sequences, length)
        diagnose_and_print(source, out, csv)
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
