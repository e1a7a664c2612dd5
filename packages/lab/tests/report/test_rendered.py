"""Snapshots of whole results: page, terminal and Markdown.

For intended changes, run `pytest packages/lab/tests/report --snapshot-update` and check the
differences.
"""

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lab.tests.report.own_functions import write_own_comparison
from lab.tests.report.study_folders import Row, write_study
from lab.tests.report.synthetic import PAPER, edited, printed, write_comparison
from lab.tests.report.synthetic_diagnoses import (
    bert_diagnosis,
    small_diagnosis,
    write_diagnosis,
)
from lab.tests.report.synthetic_translations import write_translations
from lab.tests.report.test_overlays import diagnosis, write_diagnoses
from syrupy.assertion import SnapshotAssertion

from powernorm.records import DiagnosisRecord
from powernorm_lab.report import read_comparison, render_diagnosis, render_page
from powernorm_lab.report.overlays import lines_of
from powernorm_lab.report.page import render_overlay
from powernorm_lab.report.results_document import results_document

pytestmark = pytest.mark.usefixtures("blank_figures")

CHANGES = {
    "preset": "big",
    "settings": {
        "model.num_layers": {"here": 3, "preset": 6},
        "optimizer.clip_norm": {"here": 0.1, "preset": None},
        "norm_options.pn.groups": {"here": 4},
        "optimizer.betas": {"here": [0.9, 0.98], "preset": [0.9, 0.999]},
    },
}
MARK = "sees the future"
ROWS = (
    Row("ln", "ln", [3.0, 3.2, 3.1]),
    Row("bn", "bn", [3.1, 3.3, 3.2]),
    Row("ln-future", "ln", [2.0, 2.2, 2.1], remark=MARK),
    Row("bn-future", "bn", [1.9, 2.1, 2.0], remark=MARK),
)


def write_own_function(folder: Path) -> Path:
    """Write a function with a baseline, and a run that was completed but is worse."""
    baselines = [{"name": "majority", "metrics": {"accuracy": 0.31, "valid_loss": None}}]
    write_own_comparison(folder, seeds=(0, 1, 2, 3, 4), baselines=baselines)
    with edited(folder / "results.json") as results:
        behind = {"status": "diverged", "message": "accuracy is worse than that of majority"}
        results["runs"][0] |= behind
    return folder


def write_diagnosed(folder: Path) -> Path:
    """Write seeds with diagnoses of the trained model and during training; one failed."""
    write_comparison(folder, norms=("ln", "rbn"))
    for number, run in enumerate(sorted(folder.glob("*-pre-seed*"))):
        write_diagnosis(run, diagnosis(1 + number, 30))
        records = [diagnosis(1 + number, 0), diagnosis(2 + number, 30)]
        if not number:
            records.append(diagnosis(1, 40, layers=[], notes=["the input of one holds NaN"]))
        write_diagnoses(run, records)
    return folder


def write_tuned(folder: Path) -> Path:
    """Copy files of a stored tuning."""
    folder.mkdir()
    for name in ("results.json", "trials.csv"):
        shutil.copy(TUNED / name, folder)
    return folder


TUNED = Path(__file__).parents[4] / "benchmarks/results/papers/lm-demo-small-tuned"

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "language model": write_comparison,
    "beside a paper": lambda folder: write_comparison(
        folder,
        norms=("ln", "bn", "rbn"),
        seeds=(0, 1, 2, 3),
        paper=PAPER,
        reduced="A smaller model.",
    ),
    "changed settings": lambda folder: write_comparison(
        folder, norms=("ln",), seeds=(0,), reduced="A reduced big.", changes=CHANGES
    ),
    "translations": write_translations,
    "own function": write_own_function,
    "diagnosed": write_diagnosed,
    "tuning": write_tuned,
    "marked study": lambda folder: write_study(
        folder, {"name": "future", "title": "With and without the causal mask"}, ROWS
    ),
}


class Outline(HTMLParser):
    """Texts of a page in order, with the attributes that describe them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.skipped = ""
        self.feed(re.sub(r"<wbr/?>", "", page))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("style", "script"):
            self.skipped = tag
        kept = [f'{name}="{value}"' for name, value in attrs if name in ("id", "class", "title")]
        if tag in ("figure", "section", "article", "details", "table") or kept:
            self.lines.append(" ".join([f"<{tag}", *kept]) + ">")

    def handle_endtag(self, tag: str) -> None:
        if tag == self.skipped:
            self.skipped = ""

    def handle_data(self, data: str) -> None:
        if not self.skipped and data.strip():
            self.lines.append(data.strip())


@pytest.mark.parametrize("case", FOLDERS)
def test_what_is_said_of_a_comparison(
    case: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    folder = FOLDERS[case](tmp_path / "demo")
    page = "\n".join(Outline(render_page(read_comparison(folder))).lines)
    shown = {
        "page": page,
        "terminal": printed(folder, 80, terminal=False),
        "results": results_document([folder]),
    }
    assert {name: text.replace(f"{tmp_path}/", "") for name, text in shown.items()} == snapshot


@pytest.mark.parametrize("record", [bert_diagnosis(), small_diagnosis()], ids=["bert", "small"])
def test_what_is_said_of_a_diagnosis(record: DiagnosisRecord, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(Outline(render_diagnosis(record)).lines) == snapshot


def test_what_is_said_of_several_diagnoses(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    lines = lines_of(read_comparison(write_diagnosed(tmp_path / "demo")).runs)
    assert "\n".join(Outline(render_overlay(lines)).lines) == snapshot
