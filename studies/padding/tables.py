"""The page's tables from the stored rows."""

from pathlib import Path
from typing import Any


def write(page: Path, rows: list[dict[str, Any]]) -> None:
    """Write the tables between their marks in a page."""
    raise NotImplementedError(page, rows)
