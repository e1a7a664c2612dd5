"""`powernorm diagnose`: whether batch statistics work in a model given with its batches."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from powernorm.cli.launching import INTERRUPTED
from powernorm.cli.options import TrustCode, Wide, text_width
from powernorm.cli.progress import progress_bar
from powernorm.errors import InputError, printable

if TYPE_CHECKING:
    from rich.progress import Progress

    from powernorm.diagnosis import Diagnosis
    from powernorm.inspection.batches import Progress as OnProgress
    from powernorm.inspection.devices import Device

PASSES: Final = 2
"""Callback with the progress over the batches."""

Csv = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the table of layers to this file.")
]
Batches = Annotated[int, typer.Option(min=2, metavar="N", help="Training batches in each pass.")]
DeviceName = Annotated[
    str,
    typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, …; auto is a GPU if there is one."),
]


def diagnose(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="module:name of (model, batches), or of a function that returns them.",
        ),
    ],
    csv: Csv = None,
    batches: Batches = 50,
    device: DeviceName = "auto",
    wide: Wide = False,
    trust_code: TrustCode = False,
) -> None:
    """Show whether batch statistics work, or would work, in a trained model, layer by layer.

    In Python, for any model: powernorm.diagnose(model, batches).
    """
    from powernorm.inspection.devices import checked_device
    from powernorm.integrations.extras import LABORATORY, install_command
    from powernorm.integrations.model_sources import check_folder, is_named
    from powernorm.norms import named_layers

    named_layers.trust_code(trust_code)
    place = checked_device(device)
    if not is_named(source):
        check_folder(Path(source))
        raise InputError(
            f"{source} is a folder: give module:name of (model, batches); folders are diagnosed by "
            f"{LABORATORY}, which is not installed: {install_command(LABORATORY)}"
        )
    check_target(csv)
    report = diagnosed(partial(diagnosed_own, source, batches, place), wide=wide)
    write_table(report, csv)


def diagnosed(diagnose: "Callable[[Progress], Diagnosis]", *, wide: bool) -> "Diagnosis":
    """Diagnose a model with a progress bar, and print the report."""
    try:
        with progress_bar() as progress:
            report = diagnose(progress)
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(printable(report.to_text(text_width(wide=wide))))
    return report


def diagnosed_own(source: str, batches: int, device: "Device", progress: "Progress") -> "Diagnosis":
    """Diagnose a model given as module:name."""
    from powernorm.integrations.model_sources import diagnose_own, model_by_name

    moved = bar_of(progress, batches)
    return diagnose_own(model_by_name(source), source, batches, device=device, on_progress=moved)


def bar_of(progress: "Progress", batches: int) -> "OnProgress":
    """Add a progress bar of the batches; return the function that advances it."""
    task = progress.add_task("diagnosing", total=PASSES * batches)
    return lambda done, _: progress.update(task, completed=done)


def write_table(report: "Diagnosis", csv: Path | None) -> None:
    """Write the table of layers if requested, and print its path."""
    if csv is not None:
        report.write_csv(csv)
        typer.echo(f"written: {csv}")


def check_target(target: Path | None) -> None:
    """Check the file of the table before the diagnosis, which takes minutes.

    Raises:
        InputError: no file can be written there.
    """
    if target is None:
        return
    if target.is_dir():
        raise InputError(f"{target} is a folder: give the name of a file")
    if not target.resolve().parent.is_dir():
        raise InputError(f"{target} cannot be written: {target.resolve().parent} is not a folder")
