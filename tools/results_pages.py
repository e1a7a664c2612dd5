"""Write the results in docs/results from the stored comparisons, as `make results` does.

    python tools/results_pages.py docs/results FOLDER...

Each task has a page. The part between `BEGIN` and `END` is replaced; a page without them gets them
at its end. Its tables are CSV files in a folder with the page's name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cost_tables import write

from powernorm_lab.report.results_document import results_document

BEGIN = "<!-- begin: written by `powernorm results`, do not edit -->"
END = "<!-- end: written by `powernorm results` -->"
HEADING = "### "
SENTENCES = re.compile(r"(?<=\.) (?=[A-Z]|\d+ settings )")
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
KINDS = {
    "against": "-differences",
    "here": "-settings",
    "trials": "-trials",
    "setting": "-ranges",
}
"""How a table's file is called after the title of its section, by the table's
second heading; a table of norms adds nothing."""


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


def with_files(document: str, folder: Path) -> str:
    """Write the tables of a document into CSV files; return its sections with these in place.

    The explanation in front of the sections is left out, as docs/results.md has it. Sentences that
    the first paragraphs of all sections share are said once.
    """
    sections = [section.partition("\n\n") for section in document.split(f"\n{HEADING}")[1:]]
    facts = [SENTENCES.split(text.partition("\n")[0]) for _, _, text in sections]
    shared = [one for one in facts[0] if len(facts) > 1 and all(one in each for each in facts)]
    folder.mkdir(exist_ok=True)
    parts, names = [" ".join(shared)], []
    for (heading, _, text), sentences in zip(sections, facts, strict=True):
        names.append(slug(heading))
        same = names.count(names[-1])
        name = names[-1] if same == 1 else f"{names[-1]}-{same}"
        parts += [HEADING + heading, " ".join(one for one in sentences if one not in shared)]
        parts.append(TABLE.sub(partial(stored, folder, name), text.partition("\n")[2]).strip())
    return re.sub("\n{3,}", "\n\n", "\n\n".join(parts)).strip() + "\n"


def stored(folder: Path, name: str, table: re.Match[str]) -> str:
    """Write a table of a section into a file; return the directive that shows it."""
    head, _, *rows = (
        [cell.replace("\\|", "|") for cell in line[2:-2].split(" | ")]
        for line in table[0].splitlines()
    )
    name += KINDS.get(head[1], "")
    write(folder, {name: [head, *rows]})
    return f"```{{csv-table}}\n:file: {folder.name}/{name}.csv\n:header-rows: 1\n```\n"


def slug(heading: str) -> str:
    """Return the title of a section without its task as a name of files.

    >>> slug("lm, demo, tuned")
    'demo-tuned'
    """
    return "-".join(re.findall(r"\w+", heading.partition(", ")[2]))


def write_pages(pages: Path, folders: Sequence[Path]) -> list[Path]:
    """Write each comparison into the page of its task; return the pages."""
    by_task: dict[str, list[Path]] = {}
    for folder in folders:
        task = json.loads((folder / "results.json").read_text(encoding="utf-8"))["task"]
        by_task.setdefault(task, []).append(folder)
    written = [pages / f"{task}.md" for task in by_task]
    for page, those in zip(written, by_task.values(), strict=True):
        old = page.read_text(encoding="utf-8") if page.exists() else ""
        document = with_files(results_document(those), page.with_suffix(""))
        page.write_text(with_results(old, document), encoding="utf-8")
    return written


if __name__ == "__main__":
    for name in write_pages(Path(sys.argv[1]), list(map(Path, sys.argv[2:]))):
        print(f"written: {name}")
