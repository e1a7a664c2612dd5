"""`powernorm norms` and `doctor`: the layers, and how this machine computes them."""

from typing import Annotated

import typer


def norms() -> None:
    """Show the table of norms."""
    from rich.console import Console
    from rich.table import Table

    from powernorm.norms import NORMS

    # Without a frame, whose characters would break lines at 80 columns. The width is fixed, because
    # rich would otherwise break class names rather than sentences.
    table = Table(box=None, pad_edge=False)
    widest = max(len(word) for info in NORMS.values() for word in info.title.split())
    table.add_column("name", overflow="fold", no_wrap=True)
    table.add_column("layer", overflow="fold", width=widest)
    for heading in ("averages over", "static", "paper"):
        table.add_column(heading, overflow="fold")
    for info in NORMS.values():
        static = "yes" if info.static else "no"
        table.add_row(info.name, info.title, info.averages_over, static, info.paper)
    console = Console()
    console.print(table)
    console.print("static: an affine map per feature in evaluation, which can be folded away.")


def doctor(
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Check all kernels against eager torch in float64: every norm, type and mask, "
            "about a minute.",
        ),
    ] = False,
) -> None:
    """Show which kernels this machine has, why not the rest, and whether they compute right."""
    from powernorm.cli.health import print_health, print_kernel_check

    if not (print_kernel_check() if kernels else print_health()):
        raise typer.Exit(1)
