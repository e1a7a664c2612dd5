"""Numbers of tables from CSV files are aligned to the right, as Markdown's are by their marks."""

import re
from typing import Any, Final

from docutils import nodes
from sphinx.application import Sphinx

_NUMBER: Final = re.compile(r"[-+−±<>≈–/ ]*\d.{0,40}|[–-]?")
"""A number, perhaps with its unit or interval; a dash or nothing."""


def _align(app: Sphinx, document: nodes.document) -> None:
    for table in document.findall(nodes.table):
        rows = [list(row.children) for row in table.findall(nodes.row)]
        for index, cells in enumerate(zip(*rows, strict=True)):
            texts = [cell.astext().strip() for cell in cells[1:]]
            is_number = index > 0 and any(texts) and all(map(_NUMBER.fullmatch, texts))
            for cell in cells:
                if not cell["classes"]:
                    cell["classes"].append("text-right" if is_number else "text-left")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the handler that runs on every page."""
    app.connect("doctree-read", _align)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
