"""`powernorm report RUNS…`: one page from comparisons, single runs, or several of them."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from lab.tests.report.synthetic import write_comparison
from lab.tests.report.test_page import Elements

from powernorm.errors import InputError
from powernorm.records import CONFIG_FILE
from powernorm_lab.report import read_comparison, read_selection, render_page, write_report
from powernorm_lab.runs import METRICS_FILE, RESULT_FILE, RESULTS_FILE

pytestmark = pytest.mark.usefixtures("blank_figures")

BN = "bn-pre-seed0"


def test_one_comparison(small_folder: Path) -> None:
    target = write_report([small_folder])
    assert target == small_folder / "report.html"
    assert target.read_text(encoding="utf-8") == render_page(read_comparison(small_folder))


def test_single_run(comparison_folder: Path) -> None:
    target = write_report([comparison_folder / BN])
    assert target == comparison_folder / BN / "report.html"
    (comparison,) = read_selection([comparison_folder / BN])
    assert [run.folder for run in comparison.runs] == [BN]
    # The settings of its comparison are known.
    assert (comparison.task, comparison.data["name"]) == ("lm", "lm_sotu")
    text = target.read_text(encoding="utf-8")
    assert "1 norm, 1 seed, 1 run." in text
    assert "adanorm-pre" not in text


def test_single_run_without_its_comparison(tmp_path: Path, comparison_folder: Path) -> None:
    run = shutil.copytree(comparison_folder / BN, tmp_path / "alone" / "renamed")
    text = write_report([run]).read_text(encoding="utf-8")
    assert "<svg" in text
    (comparison,) = read_selection([run])
    assert [run.norm for run in comparison.runs] == ["bn"]


def test_run_that_is_not_over(tmp_path: Path, comparison_folder: Path) -> None:
    run = tmp_path / "alone" / "rbn-post-seed3"
    run.mkdir(parents=True)
    (run / CONFIG_FILE).write_text("{}", encoding="utf-8")
    shutil.copy(comparison_folder / BN / METRICS_FILE, run / METRICS_FILE)
    text = write_report([run]).read_text(encoding="utf-8")
    assert "1 of 1 runs did not finish" in text
    assert "unfinished" in text


def test_runs_of_one_folder_make_one_table(comparison_folder: Path) -> None:
    chosen = [comparison_folder / name for name in ("ln-pre-seed0", BN, "ln-pre-seed0")]
    (comparison,) = read_selection(chosen)
    assert [run.folder for run in comparison.runs] == ["ln-pre-seed0", BN]


def test_a_run_of_a_comparison_that_is_shown_adds_nothing(comparison_folder: Path) -> None:
    for chosen in (
        [comparison_folder, comparison_folder / BN],
        [comparison_folder / BN, comparison_folder],
    ):
        (comparison,) = read_selection(chosen)
        assert len(comparison.runs) == 10


def test_several_on_one_page(tmp_path: Path) -> None:
    first = write_comparison(tmp_path / "first", norms=("ln", "bn"), seeds=(0,))
    second = write_comparison(tmp_path / "second", norms=("ln", "pn"), seeds=(0,))
    target = write_report([first, second / "pn-pre-seed0"])
    assert target == tmp_path / "report.html"
    page = target.read_text(encoding="utf-8")
    elements = Elements(page)
    articles = [attributes["id"] for attributes in elements.all("article")]
    assert articles == ["part-1", "part-2"]
    names = [attributes["id"] for attributes in elements.all("section")]
    assert {"part-1-results", "part-2-results", "part-2-tid"} <= set(names)
    ids = Counter(attributes["id"] for _, attributes in elements.found if "id" in attributes)
    assert [name for name, number in ids.items() if number > 1] == []
    references = set(re.findall(r'(?:href="|url\()#([^")]+)', page))
    assert references <= ids.keys()


def test_page_of_some_runs_does_not_replace_their_comparisons(
    comparison_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [comparison_folder / "ln-pre-seed0", comparison_folder / BN]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert write_report(chosen) == Path("report.html")
    assert not (comparison_folder / "report.html").exists()
    monkeypatch.chdir(comparison_folder)
    with pytest.raises(InputError, match="is a comparison with its own report"):
        write_report(chosen)


def test_out(small_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine.html"
    assert write_report([small_folder], target) == target
    assert not (small_folder / "report.html").exists()
    with pytest.raises(InputError, match="is a folder; give --out a file"):
        write_report([small_folder], tmp_path)
    with pytest.raises(InputError, match="does not exist; make it first"):
        write_report([small_folder], tmp_path / "no" / "page.html")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (RESULTS_FILE, '{"format": 3}', "format is 3, .*: update powernorm"),
        (f"{BN}/{RESULT_FILE}", '{"norm": "bn"', r"result.json, line 1: not JSON"),
        (f"{BN}/{RESULT_FILE}", '{"norm": "bn"}', r"result.json: seed is missing"),
    ],
)
def test_damaged_folder(comparison_folder: Path, name: str, content: str, message: str) -> None:
    if name != RESULTS_FILE:
        (comparison_folder / RESULTS_FILE).unlink()
    (comparison_folder / name).write_text(content, encoding="utf-8")
    for folder in (comparison_folder, comparison_folder / BN):
        with pytest.raises(InputError, match=message):
            write_report([folder])


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder is given"):
        read_selection([])
    with pytest.raises(InputError, match=r"neither results\.json nor run folders"):
        read_selection([tmp_path])
    with pytest.raises(InputError, match="is not a folder"):
        read_selection([tmp_path / "missing", tmp_path])
