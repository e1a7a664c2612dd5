"""The pages of docs/results are those of the stored comparisons."""

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "results"


@pytest.fixture
def results_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("results_pages")


def test_the_pages_are_made_of_the_stored_results(
    results_pages: ModuleType, tmp_path: Path
) -> None:
    shutil.copytree(PAGES, tmp_path / "pages")
    papers = sorted((ROOT / "benchmarks" / "results" / "papers").iterdir())
    written = results_pages.write_pages(
        tmp_path / "pages", [*papers, ROOT / "studies" / "causality" / "results"]
    )
    assert len(written) == 6
    assert sum(1 for _ in (tmp_path / "pages").glob("*/*.csv")) > 30
    for file in (*written, *(tmp_path / "pages").glob("*/*.csv")):
        stored = PAGES / file.relative_to(tmp_path / "pages")
        assert file.read_text() == stored.read_text(), "make results"


def test_tables_become_files(results_pages: ModuleType, tmp_path: Path) -> None:
    norms = "| norm | paper |\n| :--- | ---: |\n| a\\|b |  |\n| c, d | 1 |\n"
    gaps = "| norm | against |\n| :--- | :--- |\n| b | ln |\n"
    title = "### lm, demo, tuned"
    document = f"Explained.\n\n{title}\n\nOne. All.\n\n{norms}\nMore.\n\n{gaps}"
    document += f"\n{title}\n\nAll. Two.\n\n{norms}\nMore.\n\n{gaps}"
    made = results_pages.with_files(document, tmp_path / "lm")
    shown = "```{csv-table}\n:file: lm/demo-tuned.csv\n:header-rows: 1\n```\n"
    assert made.startswith(f"All.\n\n{title}\n\nOne.\n\n{shown}\nMore.\n\n```")
    assert f"\n{title}\n\nTwo.\n\n" in made
    assert ":file: lm/demo-tuned-2.csv" in made
    assert "|" not in made
    files = {file.name: file.read_text() for file in (tmp_path / "lm").iterdir()}
    assert files["demo-tuned.csv"] == 'norm,paper\na|b,\n"c, d",1\n' == files["demo-tuned-2.csv"]
    assert files["demo-tuned-differences.csv"] == "norm,against\nb,ln\n"
    assert len(files) == 4


def test_only_the_generated_part_of_a_page_changes(results_pages: ModuleType) -> None:
    begin, end = results_pages.BEGIN, results_pages.END
    first = results_pages.with_results("# Results\n\nWords.\n", "one")
    assert first == f"# Results\n\nWords.\n\n{begin}\n\none\n{end}\n"
    again = results_pages.with_results(f"{first}\nMore words.\n", f"a {end}")
    assert again == f"# Results\n\nWords.\n\n{begin}\n\na {end}\n{end}\n\nMore words.\n"
    assert results_pages.with_results(again, f"a {end}") == again


@pytest.mark.parametrize("marks", ["{0}\n", "{1}\n", "{1}\n{0}\n", "{0}\n{0}\n{1}\n"])
def test_a_page_with_half_a_mark_is_refused(results_pages: ModuleType, marks: str) -> None:
    with pytest.raises(SystemExit, match="expected one line"):
        results_pages.with_results(marks.format(results_pages.BEGIN, results_pages.END), "one")
