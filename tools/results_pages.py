"""Write the tables of docs/results from the stored comparisons, as `make results` does.

    python tools/results_pages.py docs/results FOLDER...

Each task has a page. The part between `BEGIN` and `END` is replaced; a page without them gets them
at its end.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from powernorm_lab.report.results_document import results_document

BEGIN = "<!-- begin: written by `powernorm results`, do not edit -->"
END = "<!-- end: written by `powernorm results` -->"


def with_results(page: str, document: str) -> str:
    """Return the page with its generated part replaced.

    Raises:
        SystemExit: the page has only one of the two marks, or one twice.
    """
    written = f"{BEGIN}\n\n{document}\n{END}\n"
    # A mark is a line by itself, as a result's text may contain the same words.
    begins, ends = (
        list(re.finditer(rf"^{re.escape(mark)}\n", page, re.MULTILINE)) for mark in (BEGIN, END)
    )
    if not begins and not ends:
        return f"{page.rstrip()}\n\n{written}".lstrip()
    if (len(begins), len(ends)) == (1, 1) and begins[0].start() < ends[0].start():
        return page[: begins[0].start()] + written + page[ends[0].end() :]
    raise SystemExit(f"expected one line {BEGIN!r} and, after it, one line {END!r}")


def write_pages(pages: Path, folders: Sequence[Path]) -> list[Path]:
    """Write each comparison into the page of its task; return the pages."""
    by_task: dict[str, list[Path]] = {}
    for folder in folders:
        task = json.loads((folder / "results.json").read_text(encoding="utf-8"))["task"]
        by_task.setdefault(task, []).append(folder)
    written = [pages / f"{task}.md" for task in by_task]
    for page, those in zip(written, by_task.values(), strict=True):
        old = page.read_text(encoding="utf-8") if page.exists() else ""
        page.write_text(with_results(old, results_document(those)), encoding="utf-8")
    return written


if __name__ == "__main__":
    for name in write_pages(Path(sys.argv[1]), list(map(Path, sys.argv[2:]))):
        print(f"written: {name}")
