"""Options that several commands share."""

from shutil import get_terminal_size
from typing import Annotated

import typer

TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Import the modules of your own norms and functions that files of the run name, "
        "which runs their code; not from the current folder.",
    ),
]


Wide = Annotated[
    bool,
    typer.Option(
        "--wide",
        help="Print all columns, each row in one line; else only those that fit the terminal.",
    ),
]


def text_width(*, wide: bool) -> int | None:
    """Return the line width in characters for `NormTable.to_text`: 80 in a file or a pipe."""
    return None if wide else get_terminal_size().columns
