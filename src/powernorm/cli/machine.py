"""`powernorm norms` and `doctor`: the layers, and how this machine computes them."""

from typing import Annotated

import typer

from powernorm.errors import InputError


def norms() -> None:
    """Show the table of norms."""
    from rich.console import Console
    from rich.table import Table

    from powernorm.norms import NORMS

    # No frame: its strokes would cost the columns that break lines at 80 characters. A fixed width,
    # for rich would rather break a class name in two than the sentences beside it.
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
            help="Check all kernels against float64 formulas: every norm, type, mask and width, "
            "about a minute.",
        ),
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Of the cases of --kernels (0).")
    ] = None,
    case: Annotated[
        int | None, typer.Option(min=0, metavar="K", help="Of --kernels, this case alone.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what --kernels finds as JSON.")
    ] = False,
) -> None:
    """Show which kernels this machine has, why not the rest, and whether they compute right."""
    if kernels:
        from powernorm.cli.kernel_check import check_all_kernels

        check_all_kernels(seed or 0, case, as_json=as_json)
        return
    given = {"seed": seed is not None, "case": case is not None, "json": as_json}
    for option in (name for name, is_given in given.items() if is_given):
        raise InputError(f"--{option} is for the check of --kernels: add --kernels")
    from powernorm.cli.health import print_health

    if not print_health():
        raise typer.Exit(1)
