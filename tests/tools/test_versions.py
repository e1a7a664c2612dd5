"""The table of versions has a row for each Python and torch."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("versions")


PAGE = """\
# Versions

| date | Python | torch |
|---|---|---|
| 2026-01-01 | 3.11.7 | 2.13.0 | x |

More.
"""


def test_a_row_replaces_that_of_the_same_python_and_torch(versions: ModuleType) -> None:
    page = versions.with_row(PAGE, ["2026-02-02", "3.11.7", "2.14.1", "y"])
    assert page.splitlines()[4:] == [
        "| 2026-02-02 | 3.11.7 | 2.14.1 | y |", "| 2026-01-01 | 3.11.7 | 2.13.0 | x |", "", "More.",
    ]  # fmt: skip
    again = versions.with_row(page, ["2026-03-03", "3.11.7", "2.14.1", "z"])
    assert "| y |" not in again
    assert again.count("2.14.1") == 1
    assert "| 2.13.0 | x |" in again


def written(path: Path, outcomes: str) -> Path:
    """A file of results: P passed, F failed, E error, S skipped."""
    inner = {"P": "", "F": "<failure/>", "E": "<error/>", "S": "<skipped/>"}
    cases = [f'<testcase name="{i}">{inner[one]}</testcase>' for i, one in enumerate(outcomes)]
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_counts_of_a_run_and_of_a_later_one(versions: ModuleType, tmp_path: Path) -> None:
    first = written(tmp_path / "first.xml", "FESSPPPPP")
    assert versions.row_of(first)[-3:] == ["5", "2", "2"]
    assert versions.row_of(first, written(tmp_path / "later.xml", "PF"))[-3:] == ["6", "1", "2"]
