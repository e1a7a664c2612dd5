"""Write the suite's results with the installed versions as a row of docs/versions.md.

`make test-newest` runs it after the suite, by the Python of the same environment:

    python tools/versions.py RESULTS.xml [LATER.xml...] docs/versions.md

A test in several files counts as in the last. A row of the same Python and torch is replaced.
"""

from __future__ import annotations

import datetime
import platform
import sys
import xml.etree.ElementTree as ET
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "numpy", "transformers", "lightning", "onnx", "onnxruntime")
HEAD = ("date", "Python", *PACKAGES, "passed", "failed", "skipped")


def installed(package: str) -> str:
    """Return the version of a package, a dash if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "–"


def row_of(*results: Path) -> list[str]:
    """Return the row of runs of pytest with `--junit-xml`."""
    outcomes = {}
    for path in results:
        cases = ET.parse(path).getroot().iter("testcase")
        outcomes |= {
            (case.get("classname"), case.get("name")): {e.tag for e in case} for case in cases
        }
    failed = sum(bool(tags & {"failure", "error"}) for tags in outcomes.values())
    skipped = sum("skipped" in tags for tags in outcomes.values())
    counts = [str(number) for number in (len(outcomes) - failed - skipped, failed, skipped)]
    today = datetime.date.today().isoformat()
    return [today, platform.python_version(), *map(installed, PACKAGES), *counts]


def with_row(page: str, row: list[str]) -> str:
    """Return a page whose table has the row, in the place of an older one."""
    lines = page.rstrip().splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("| date |")) + 2
    kept = [
        line
        for line in lines[begin:]
        if [cell.strip() for cell in line.split("|")][2:4] != row[1:3] or not line.startswith("|")
    ]
    table = sorted([line for line in kept if line.startswith("|")] + [f"| {' | '.join(row)} |"])
    rest = [line for line in kept if not line.startswith("|")]
    return "\n".join([*lines[:begin], *reversed(table), *rest]) + "\n"


def main() -> None:
    """Write the row."""
    *results, page = map(Path, sys.argv[1:])
    page.write_text(with_row(page.read_text(encoding="utf-8"), row_of(*results)), encoding="utf-8")
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
