"""Comparisons of users' training functions with unknown metrics."""

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from lab.tests.report.own_functions import FUNCTION, NORMS, SEEDS, TASK, write_own_comparison
from lab.tests.report.test_page import Elements
from pictures import draw_training_curves
from rich.console import Console

from powernorm.errors import InputError
from powernorm_lab.report import (
    Comparison,
    print_comparison,
    read_comparison,
    read_selection,
    render_page,
    summarize,
    write_report,
    write_reports,
)
from powernorm_lab.report.columns import MAX_METRICS
from powernorm_lab.report.comparison_tables import run_table, table_of
from powernorm_lab.report.figures import MAX_CURVES, learning_curves, own_columns
from powernorm_lab.report.numerals import printable
from powernorm_lab.report.results_document import joined, results_document
from powernorm_lab.report.summary import best_rows
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
    table = table_of(comparison, summarize(comparison))
    return {line[0]: dict(zip(table.headings, line, strict=True)) for line in table.lines}


def printed(comparison: Comparison, width: int) -> str:
    stream = StringIO()
    print_comparison(
        Console(file=stream, width=width, color_system=None, force_terminal=True), comparison
    )
    return stream.getvalue()


def change(folder: Path, **values: Any) -> Path:
    """Write other values into both files of a comparison."""
    for name in (RESULTS_FILE, COMPARISON_FILE):
        written = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(written | values), encoding="utf-8")
    return folder


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(("direction", "best"), [("max", "pn"), ("min", "bn")])
def test_the_goal_says_which_norm_is_best(tmp_path: Path, direction: str, best: str) -> None:
    goal = {"metric": "accuracy", "direction": direction}
    complete = read_comparison(write_own_comparison(tmp_path / "own", lost=(), goal=goal))
    assert best_rows(summarize(complete), complete.measure) == {best}
    shaded = re.findall(r'<tr class="best"><th scope="row">(.+?)</th>', render_page(complete))
    assert shaded == [best]
    assert ("higher" if direction == "max" else "lower") + " is better" in render_page(complete)


def test_a_norm_without_a_number_of_every_seed_is_not_the_best(tmp_path: Path) -> None:
    """pn is ahead in the two seeds that gave a number."""
    folder = write_own_comparison(tmp_path / "own", lost=())
    written = json.loads((folder / RESULTS_FILE).read_text())
    written["runs"][-1]["metrics"]["accuracy"] = None
    (folder / RESULTS_FILE).write_text(json.dumps(written))
    comparison = read_comparison(folder)
    assert best_rows(summarize(comparison), comparison.measure) == {"ln"}
    assert rows_of(comparison)["pn"]["accuracy"].endswith(" *")
    assert "* Not every run gave this number" in printed(comparison, 100)


def test_no_gap_without_the_reference(tmp_path: Path) -> None:
    own = read_comparison(write_own_comparison(tmp_path / "own", norms=("bn", "pn")))
    assert "gap to ln" not in rows_of(own)["pn"]
    assert "gap to" not in results_document([own.folder]).partition("###")[2]


def test_speeds_stand_where_they_are_known(tmp_path: Path) -> None:
    folder = write_own_comparison(tmp_path / "own", lost=())
    written = json.loads((folder / RESULTS_FILE).read_text())
    for run in written["runs"]:
        run |= {"examples_per_second": 725.0, "tokens_per_second": 41_000.0, "parameters": None}
    (folder / RESULTS_FILE).write_text(json.dumps(written))
    row = rows_of(read_comparison(folder))["pn"]
    assert (row["examples/s"], row["tokens/s"]) == ("725", "41.0k")
    assert "parameters" not in row


@pytest.mark.usefixtures("blank_figures")
def test_a_baseline_of_a_task_of_ones_own_is_named(tmp_path: Path) -> None:
    baselines = [{"name": "majority", "metrics": {"accuracy": 0.31, "valid_loss": None}}]
    folder = write_own_comparison(tmp_path / "own", baselines=baselines)
    written = json.loads((folder / RESULTS_FILE).read_text())
    written["runs"][0] |= {
        "status": "diverged",
        "message": "accuracy is worse than that of majority",
    }
    (folder / RESULTS_FILE).write_text(json.dumps(written))
    own = read_comparison(folder)
    rows = rows_of(own)
    assert rows["majority"]["accuracy"] == "0.3100"
    # Nothing diverged, because the function was completed.
    assert rows["ln"]["runs"] == "2 of 3 finished; worse than a baseline: seed 0"
    page = render_page(own)
    assert "Dotted: baselines." in page


@pytest.mark.usefixtures("blank_figures")
def test_curves_are_of_what_was_logged(comparison: Comparison) -> None:
    columns = own_columns(comparison)
    assert columns == ["train_loss", "valid_loss", "accuracy", "gradient_norm"]
    captions = [drawn.caption for drawn in learning_curves(comparison)]
    assert captions[2].startswith("The accuracy as the function logged it. Thin: a run")


@pytest.mark.parametrize(
    "other",
    [
        {"goal": {"metric": "valid_loss", "direction": "min"}},
        {"goal": {"metric": "accuracy", "direction": "min"}},
        {"task": "my.module:other"},
        {"function": FUNCTION | {"sha256": "f" * 64}},
    ],
)
def test_other_goals_and_functions_stand_by_themselves(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    one = write_own_comparison(tmp_path / "a", seeds=(0, 1), lost=())
    two = write_own_comparison(tmp_path / "b", seeds=(2, 3), lost=(), **other)
    assert len(joined(map(read_comparison, (one, two)))) == 2


def test_seeds_of_one_function_are_put_together(tmp_path: Path) -> None:
    """The function's file may have another path on another machine."""
    moved = FUNCTION | {"file": "elsewhere/module.py"}
    one = write_own_comparison(tmp_path / "a", seeds=(0, 1), lost=())
    two = write_own_comparison(tmp_path / "b", seeds=(2, 3), lost=(), function=moved)
    (together,) = joined(map(read_comparison, (one, two)))
    assert len(together.runs) == 12


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
    assert "0 norms, 0 seeds, 0 runs" in write_report(begun).read_text(encoding="utf-8")
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
        write_reports([begun / "pn-seed0", begun / "ln-seed0"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"goal": {"metric": "accuracy", "direction": "up"}}, "goal.direction is 'up', expected"),
        ({"goal": {"direction": "max"}}, "goal.metric is missing"),
        ({"goal": "accuracy"}, "goal is 'accuracy', expected an object"),
        ({"function": "train"}, "function is 'train', expected an object"),
        ({"function": {"name": 3}}, "function.name is 3, expected a string"),
        ({"format": 3}, "format is 3, this version reads 2: update powernorm"),
    ],
)
@pytest.mark.parametrize("name", [RESULTS_FILE, COMPARISON_FILE])
def test_damaged_heads_are_named(
    tmp_path: Path, name: str, values: dict[str, Any], message: str
) -> None:
    folder = write_own_comparison(tmp_path / "own", norms=("ln",), seeds=(0,), lost=())
    change(folder, **values)
    if name == COMPARISON_FILE:
        (folder / RESULTS_FILE).unlink()
    with pytest.raises(InputError, match=re.escape(f"{name}: {message}")):
        read_comparison(folder)


def test_a_goal_must_be_said(tmp_path: Path) -> None:
    folder = write_own_comparison(tmp_path / "own", norms=("ln",), seeds=(0,), lost=())
    written = json.loads((folder / RESULTS_FILE).read_text())
    del written["goal"]
    (folder / RESULTS_FILE).write_text(json.dumps(written))
    with pytest.raises(InputError, match="goal is missing"):
        read_comparison(folder)


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
    keys = table_of(hostile, summarize(hostile)).keys
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


def test_metrics_without_a_number_cost_no_run(hostile: Comparison) -> None:
    """A precision may be undefined without any findings; the goal may not."""
    assert all(run.finished for run in hostile.runs)
    (row, _) = summarize(hostile)
    assert "undefined" not in row.metrics
    assert "nothing" not in rows_of(hostile)["ln"]


def test_a_goal_that_is_no_number_is_no_result(tmp_path: Path) -> None:
    folder = write_own_comparison(tmp_path / "own", lost=())
    written = json.loads((folder / RESULTS_FILE).read_text())
    written["runs"][0] |= {"status": "nonfinite", "metrics": {"accuracy": None}}
    (folder / RESULTS_FILE).write_text(json.dumps(written))
    assert rows_of(read_comparison(folder))["ln"]["runs"] == "2 of 3 finished; NaN: seed 0"


def test_logs_may_have_columns_of_any_name(hostile: Comparison) -> None:
    """`layer` and `norm` are words in norms.csv only."""
    last = hostile.runs[0].curve.iloc[-1]
    assert (last["layer"], last["norm"], last[LONG]) == (7.0, 3.0, 2.0)


def test_a_picture_of_the_curves(folder: Path, tmp_path: Path) -> None:
    text = draw_training_curves([folder], tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "<!-- train loss -->" in text
    assert "<!-- valid loss -->" in text
    assert "nats" not in text


def test_a_built_in_task_may_have_another_goal(comparison_folder: Path) -> None:
    """Its own headings are kept, and the column of the goal is the first."""
    written = json.loads((comparison_folder / RESULTS_FILE).read_text())
    goal = {"metric": "valid_loss", "direction": "min"}
    (comparison_folder / RESULTS_FILE).write_text(json.dumps(written | {"goal": goal}))
    comparison = read_comparison(comparison_folder)
    headings = table_of(comparison, summarize(comparison)).headings
    assert headings[:4] == ["norm", "parameters", "valid loss", "gap to ln"]
    assert "test perplexity" in headings
    assert rows_of(comparison)["unigram"]["test perplexity"] == "910.0"
    assert comparison.where == "pre-norm"
