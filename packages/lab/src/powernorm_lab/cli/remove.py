"""`powernorm remove`: remove LayerNorm and RMSNorm from a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powernorm_lab.cli import options
from powernorm_lab.cli.ends import interruptible

if TYPE_CHECKING:
    from powernorm_lab.removal.removing import Removed


def remove(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Run of `powernorm compare` or one of its checkpoints, a folder with a Hugging "
            "Face model, or module:name of (model, batches) or of a function that returns them.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder of the removal; DIR/model is the model without norms, for powernorm.load.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Training data: a text file, a folder of them, or the name of an embedded text. "
            "For a run: as for `compare --data`; default: the run's text.",
        ),
    ] = None,
    other: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="For a Hugging Face model: another text, whose test split is also measured at the "
            "end. Short for --set data.other=TEXT.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="match (the default), match-centered, freeze, freeze-in-turn, taper or prepbn; "
            "short for --set method.name=NAME.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Updates; default: a tenth of a run's, 300 for other models."
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(metavar="PART", help="Updates as a fraction of a run's, such as 0.03."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of the batches' order and of dropout.")
    ] = 0,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting; may be given several times. docs/removal.md lists them.",
        ),
    ] = None,
    resume: Annotated[bool, options.resume("the removal", ", if any")] = False,
    force: Annotated[bool, options.force("the removal")] = False,
    stock: Annotated[
        bool,
        typer.Option(
            "--stock",
            help="For a Hugging Face model: also write DIR/stock, which its original class loads "
            "without powernorm; with --method match-centered, freeze or taper.",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="auto (a GPU if there is one), cpu, cuda, cuda:1, …"),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="CPU threads of torch; 1 is best for small models."),
    ] = None,
    quiet: options.Silent = False,
    trust_code: options.TrustCode = False,
) -> None:
    """Remove the norms of a trained model by a short training, and fold the remaining scales.

    Ctrl-C, SIGTERM and SIGUSR1 leave a checkpoint, from which the same command with --resume
    continues as if it had not been interrupted. In Python: powernorm_lab.remove(model, out).
    """
    from powernorm.norms import named_layers
    from powernorm_lab.removal.removing import remove as remove_norms

    named_layers.trust_code(trust_code)
    given = {
        "data.other": other,
        "method.name": method,
        "training.steps": steps,
        "training.share": share,
        "training.num_threads": threads,
        "seed": seed or None,
    }
    changes = [f"{key}={value}" for key, value in given.items() if value is not None]
    with interruptible(out):
        removed = remove_norms(
            model,
            out,
            data=data,
            settings=[*changes, *(assignments or [])],
            device=device,
            resume=resume,
            force=force,
            stock=stock,
            quiet=quiet,
        )
    _print_removed(removed)


def _print_removed(removed: "Removed") -> None:
    from rich.console import Console

    from powernorm_lab.removal.removing import MODEL_FOLDER
    from powernorm_lab.removal.report import removal_table
    from powernorm_lab.report import print_table

    table = removal_table(removed.metrics)
    if table.lines:
        print_table(Console(), table)
    if removed.is_folded:
        typer.echo(f"model without norms: {removed.folder / MODEL_FOLDER}")
    if removed.stock is not None:
        typer.echo(f"for its original class, without powernorm: {removed.stock}")
    typer.echo(f"report: {removed.report}")
