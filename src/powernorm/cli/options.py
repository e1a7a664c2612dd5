"""Options that several commands share."""

from shutil import get_terminal_size
from typing import Annotated

import typer

TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Import the modules of norms and functions of your own that files of the run name, "
        "which runs their code; not out of the current folder.",
    ),
]


Wide = Annotated[
    bool,
    typer.Option(
        "--wide",
        help="Print all columns, each row in one line; else those that the terminal has room for.",
    ),
]


def text_width(*, wide: bool) -> int | None:
    """Return the characters of a line for `NormTable.to_text`: 80 in a file or a pipe."""
    return None if wide else get_terminal_size().columns
