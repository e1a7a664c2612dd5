"""What users see first: public names, help and stored figures, compared with snapshots.

Where a change is meant: `pytest tests/frozen --snapshot-update`, and look at the difference.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from commands import powernorm as command

ROOT = Path(__file__).parents[2]
PACKAGES = ("powernorm", "powernorm.norms", "powernorm.ops", "powernorm.surgery")
PACKAGES += ("powernorm.diagnosis", "powernorm.lab")


def described(name: str, value: Any) -> Iterator[str]:
    """The line of a name, and of each public member that a class defines."""
    if inspect.isclass(value) and not issubclass(value, BaseException):
        yield f"class {name}{signature(value)}"
        for member, entry in sorted(inspect.getmembers(value)):
            owner = next((base for base in value.__mro__ if member in vars(base)), object)
            if not member.startswith("_") and owner.__module__.startswith("powernorm"):
                yield f"    {member}{signature(entry)}"
    else:
        yield f"{name}{signature(value)}"


def signature(value: Any) -> str:
    """Its parameters, empty where it has none of its own, as an exception."""
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names(package: str, snapshot: SnapshotAssertion) -> None:
    module = importlib.import_module(package)
    lines = [line for name in module.__all__ for line in described(name, getattr(module, name))]
    assert re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines)) == snapshot


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
    pages = (ROOT / "docs" / "results").glob("*.md")
    parts = [
        page.read_text(encoding="utf-8").partition("<!-- begin: written by `powernorm results`")[2]
        for page in pages
    ]

    def cells(text: str) -> dict[str, list[list[str]]]:
        """The numbers in the rows of each section."""
        sections = [section.partition("\n") for section in text.split("\n### ")[1:]]
        return {
            title: [
                re.findall(r"[-+−]?\d+(?:\.\d+)?", row) for row in re.findall(r"(?m)^\|.*", rest)
            ]
            for title, _, rest in sections
        }

    stored = cells("\n".join(parts))
    assert cells(printed.out) == stored
    assert sum(len(row) for rows in stored.values() for row in rows) > 500
