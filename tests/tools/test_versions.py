"""The table of versions takes a row for each Python and torch."""

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


def test_counts_of_a_run(versions: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'
    )
    assert versions.row_of(results)[-3:] == ["5", "2", "2"]
