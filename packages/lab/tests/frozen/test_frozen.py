"""Snapshots of names, help and stored results of the laboratory.

For intended changes, run `pytest packages/lab/tests/frozen --snapshot-update` and check the
differences.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from syrupy.assertion import SnapshotAssertion

from commands import powernorm as command
from public_names import public_names

ROOT = Path(__file__).parents[4]


def test_public_names(snapshot: SnapshotAssertion) -> None:
    assert public_names("powernorm_lab") == snapshot


def test_help_of_every_command(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    shown = {"": command(tmp_path, "--help").out}
    names = re.findall(r"^  ([a-z-]+) ", shown[""].partition("Commands:")[2], re.MULTILINE)
    parts = [(name,) for name in names]
    parts += [("data", name) for name in ("get", "where", "remove")]
    for words in parts:
        outcome = command(tmp_path, *words, "--help")
        assert outcome.code == 0, outcome.err
        shown[" ".join(words)] = outcome.out
    assert shown == snapshot


def test_figures_of_the_stored_comparisons(tmp_path: Path) -> None:
    """Words may change; the numbers of docs/results/ are those of the stored runs."""
    folders = sorted((ROOT / "benchmarks" / "results" / "papers").iterdir())
    folders.append(ROOT / "studies" / "causality" / "results")
    printed = command(tmp_path, "results", *folders)
    assert printed.code == 0, printed.err
    folder = ROOT / "docs" / "results"
    parts = [
        page.read_text(encoding="utf-8").partition("<!-- begin: written by `powernorm results`")[2]
        for page in folder.glob("*.md")
    ]

    def table(directive: re.Match[str]) -> str:
        head, *rows = csv.reader((folder / directive[1]).read_text(encoding="utf-8").splitlines())
        return "\n".join("| " + " | ".join(row) for row in (head, [], *rows))

    def cells(text: str) -> dict[str, list[list[str]]]:
        """Return the numbers in the rows of each section."""
        sections = [section.partition("\n") for section in text.split("\n### ")[1:]]
        return {
            title: [
                re.findall(r"[-+−]?\d+(?:\.\d+)?", row) for row in re.findall(r"(?m)^\|.*", rest)
            ]
            for title, _, rest in sections
        }

    shown = re.sub(r"```\{csv-table\}\n:file: (.*)\n:header-rows: 1\n```", table, "\n".join(parts))
    stored = cells(shown)
    assert cells(printed.out) == stored
    assert sum(len(row) for rows in stored.values() for row in rows) > 500
