"""The table of norms in the terminal."""

from typing import Final

from rich.console import Console
from rich.table import Table

from powernorm.norms import NORMS

_LAYER_WIDTH: Final = max(len(word) for info in NORMS.values() for word in info.title.split())
"""Fixed, for rich would rather break a class name in two than the sentences beside it."""


def print_norms() -> None:
    """Prints every short name with what it averages, whether it is static, and its paper."""
    # No frame: its strokes would cost the columns that break lines at 80 characters.
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "layer", "averages over", "static", "paper"):
        table.add_column(
            heading,
            overflow="fold",
            no_wrap=heading == "name",
            width=_LAYER_WIDTH if heading == "layer" else None,
        )
    for info in NORMS.values():
        table.add_row(
            info.name, info.title, info.averages_over, "yes" if info.static else "no", info.paper
        )
    console = Console()
    console.print(table)
    console.print("static: an affine map per feature in evaluation, which can be folded away.")
