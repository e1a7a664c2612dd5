"""Comparisons of users' training functions with unknown metrics."""

import re
import shutil
from pathlib import Path

import pytest
from lab.tests.report.own_functions import NORMS, SEEDS, TASK, write_own_comparison
from lab.tests.report.synthetic import made_comparison, made_run, printed
from lab.tests.report.test_page import Elements
from pictures import draw_training_curves

from powernorm.errors import InputError
from powernorm_lab.report import (
    Comparison,
    read_comparison,
    read_selection,
    render_page,
    summarize,
    write_report,
)
from powernorm_lab.report.comparison_tables import (
    MAX_METRICS,
    hidden_metrics,
    norm_table,
    run_table,
)
from powernorm_lab.report.figures import MAX_CURVES, learning_curves
from powernorm_lab.report.numerals import printable
from powernorm_lab.report.results_document import results_document
from powernorm_lab.runs import COMPARISON_FILE, METRICS_FILE, RESULTS_FILE

LONG = "m" * 1000
HOSTILE: dict[str, float | None] = {
    "<b>|x": 1.0,
    LONG: 2.0,
    "norm": 3.0,
    "": 4.0,
    "\x1b[2J\nend": 5.0,
    "nothing": None,
    "undefined": None,
    "`code` $x$ & </script><script>": 6.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_own_comparison(tmp_path_factory.mktemp("own") / "mine")


@pytest.fixture(scope="module")
def comparison(folder: Path) -> Comparison:
    return read_comparison(folder)


def rows_of(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Return the texts of the table by norm and heading."""
    table = norm_table(comparison, summarize(comparison))
    return {line[0]: dict(zip(table.headings, line, strict=True)) for line in table.lines}


@pytest.mark.usefixtures("blank_figures")
def test_a_comparison_that_has_only_begun(folder: Path, tmp_path: Path) -> None:
    """`comparison.json` exists before the first result and has goal and order of the norms."""
    begun = shutil.copytree(folder, tmp_path / "begun")
    (begun / RESULTS_FILE).unlink()
    comparison = read_comparison(begun)
    assert comparison.goal == {"metric": "accuracy", "direction": "max"}
    assert [(run.norm, run.seed) for run in comparison.runs] == [
        (norm, seed) for norm in NORMS for seed in SEEDS
    ]
    assert rows_of(comparison) == rows_of(read_comparison(folder))
    for run in begun.glob("*-seed*"):
        shutil.rmtree(run)
    assert read_comparison(begun).runs == []
    assert "0 norms, 0 seeds, 0 runs" in write_report([begun]).read_text(encoding="utf-8")
    assert TASK in printed(read_comparison(begun), 80)
    assert TASK in results_document([begun])


@pytest.mark.usefixtures("blank_figures")
def test_runs_alone_name_their_function(folder: Path, tmp_path: Path) -> None:
    """Runs do not name the better direction of a metric, so that none becomes the goal."""
    alone = shutil.copytree(folder, tmp_path / "alone")
    for name in (RESULTS_FILE, COMPARISON_FILE):
        (alone / name).unlink()
    comparison = read_comparison(alone)
    assert (comparison.task, comparison.placement) == (TASK, None)
    assert comparison.metric == "valid_loss"
    assert rows_of(comparison)["ln"]["accuracy"] == "0.9123 ± 0.0040"
    assert "perplexity" not in render_page(comparison)


def test_a_single_run_knows_its_comparison(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = shutil.copytree(folder, tmp_path / "begun")
    (begun / RESULTS_FILE).unlink()
    (comparison,) = read_selection([begun / "pn-seed0", begun / "ln-seed0"])
    assert comparison.metric == "accuracy"
    assert [run.name for run in comparison.runs] == ["pn", "ln"]
    # The page of two runs must not replace the comparison's own.
    monkeypatch.chdir(begun)
    with pytest.raises(InputError, match="name the file by --out"):
        write_report([begun / "pn-seed0", begun / "ln-seed0"])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Write a function with hostile metrics and logs, and a norm with a long name."""
    logged = {name: value for name, value in HOSTILE.items() if name and value is not None}
    logged |= {f"logged_{number}": 1e-9 * 10**number for number in range(MAX_CURVES)}
    folder = write_own_comparison(
        tmp_path_factory.mktemp("hostile") / "own",
        norms=("ln", "my.module:MyNorm"),
        seeds=(0, 1),
        lost=(),
        metrics=HOSTILE | {f"more_{number}": 1e30 * number for number in range(200)},
        logged={"layer": 7.0, **logged},
    )
    return read_comparison(folder)


def test_hostile_names_stay_in_their_cells(hostile: Comparison) -> None:
    page = render_page(hostile)
    elements = Elements(page)  # every tag is closed
    assert "b" not in {name for name, _ in elements.found}
    assert elements.all("script") == [{}]
    assert "&lt;b&gt;|x" in page
    assert "my.module:MyNorm" in elements.texts
    assert (hostile.folder / "my.module+MyNorm-seed0").is_dir()
    assert max(map(len, elements.texts), default=0) < 5000
    text = printed(hostile, 100)
    assert max(map(len, text.splitlines())) <= 100
    assert text == printable(text)
    (head,) = re.findall(r"^\| norm .*", results_document([hostile.folder]), re.MULTILINE)
    assert r"\<b\>\|x" in head
    assert len(head) < 500


@pytest.mark.usefixtures("blank_figures")
def test_many_metrics_do_not_destroy_the_page(hostile: Comparison) -> None:
    keys = [column.name for column in norm_table(hostile, summarize(hostile)).columns]
    # Two of the eight have no number in any run.
    assert sum(key.startswith("metric ") for key in keys) == MAX_METRICS - 2
    assert len(run_table(hostile).headings) < 20
    num_more = len(hostile.other_metrics) - MAX_METRICS
    page = render_page(hostile)
    assert f"{num_more} more metrics" in page
    assert f"the first 100 of {num_more}." in page
    assert f"{num_more} more metrics: in results.json" in printed(hostile, 100)
    assert len(learning_curves(hostile)) == MAX_CURVES
    assert f"more columns in {METRICS_FILE}" in page


def test_a_task_names_its_metrics() -> None:
    """Any further ones in its results are no columns, and the page does not list them."""
    metrics = {"test_accuracy": 90.0, **{f"more_{number}": 1.0 for number in range(20)}}
    assert hidden_metrics(made_comparison([made_run("ln", metrics=metrics)], "test_accuracy")) == []


def test_metrics_without_a_number_cost_no_run(hostile: Comparison) -> None:
    """A precision may be undefined without any findings; the goal may not."""
    assert all(run.finished for run in hostile.runs)
    (row, _) = summarize(hostile)
    assert "undefined" not in row.metrics
    assert "nothing" not in rows_of(hostile)["ln"]


def test_logs_may_have_columns_of_any_name(hostile: Comparison) -> None:
    """`layer` and `norm` are words in norms.csv only."""
    last = hostile.runs[0].curve.iloc[-1]
    assert (last["layer"], last["norm"], last[LONG]) == (7.0, 3.0, 2.0)


def test_a_picture_of_the_curves(folder: Path, tmp_path: Path) -> None:
    text = draw_training_curves([folder], tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "<!-- train loss -->" in text
    assert "<!-- valid loss -->" in text
    assert "nats" not in text
