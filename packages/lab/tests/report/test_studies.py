"""Section of a study, from files only."""

import json
import math
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from lab.tests.report.conftest import FigureData
from lab.tests.report.study_folders import STEPS, Row, write_scales, write_study
from lab.tests.report.synthetic import edited
from syrupy.assertion import SnapshotAssertion

from powernorm.errors import InputError
from powernorm_lab.report import read_comparison, write_report
from powernorm_lab.report.page import rendered_comparison
from powernorm_lab.report.studies import (
    layernorm_parts,
    lowest_layers,
    metric,
    points_of,
    scales,
)
from powernorm_lab.runs import METRICS_FILE

SIZES = {"name": "micro-batches", "title": "Sizes", "x_label": "tokens", "logarithmic": True}
GRID = {"name": "penalties", "title": "Grid", "x_label": "λ of the mean", "y_label": "λ of var"}
SIZE_ROWS = (
    Row("ln", "ln", [3.0, 3.1]),
    Row("bn-64", "bn", [4.0, 4.2], 64.0),
    Row("bn-128", "bn", [3.5, "diverged"], 128.0),
    Row("pn-64", "pn", ["nonfinite", "nonfinite"], 64.0),
    Row("pn-128", "pn", [3.2, 3.3], 128.0),
)


LAYERS = {"name": "lowest-layers", "title": "Lowest", "x_label": "layers"}
PARTS = {"name": "layernorm-parts", "title": "Parts"}


def grid_rows(*losses: float | str) -> Sequence[Row]:
    places = [(x, y) for x in (0.0, 1.0) for y in (0.0, 10.0)]
    return [
        Row("ln", "ln", [3.0]),
        *(
            Row(f"rbn-{x:g}-{y:g}", "rbn", [loss], x, y)
            for (x, y), loss in zip(places, losses, strict=True)
        ),
    ]


def section(folder: Path) -> str:
    return str(rendered_comparison(read_comparison(folder)).study())


def texts(markup: str) -> list[str]:
    return [unescape(text).strip() for text in re.findall(r">([^<>]+)<", markup)]


MARK = "sees the future"
ONE_LAYER = (Row("ln", "ln", [3.0], 0.0), Row("bn-1of1", "bn", [3.1], 1.0))
TWO_PARTS = (Row("ln", "ln", [3.0]), Row("none", "none", [3.5]))
CASES: dict[str, tuple[dict[str, Any], Sequence[Row]]] = {
    "sizes": (SIZES, SIZE_ROWS),
    "sizes, far apart": (SIZES, (Row("a", "bn", [8.0], 64.0), Row("b", "bn", [3.0], 128.0))),
    "layers": (
        LAYERS,
        (
            Row("ln", "ln", [3.0, 3.2], 0.0),
            Row("bn-1of2", "bn", [3.1, 3.3], 1.0),
            Row("bn-2of2", "bn", [3.5, "diverged"], 2.0),
        ),
    ),
    "layers, far apart": (
        LAYERS,
        (Row("ln", "ln", [3.0], 0.0), Row("bn-1of1", "bn", [9.0], 1.0)),
    ),
    "grid": (GRID, grid_rows(3.3, 3.25, "diverged", 3.125)),
    "grid, a seed lost": (
        GRID,
        [Row("rbn-0-0", "rbn", [3.3, "nonfinite"], 0.0, 0.0), Row("b", "rbn", [3.0], 1.0, 0.0)],
    ),
    "grid, all lost": (GRID, grid_rows(*["nonfinite"] * 4)),
    "parts": (
        PARTS,
        (
            Row("ln", "ln", [3.0, 3.1]),
            Row("detach-both", "detach", [3.4, "diverged"]),
            Row("none", "none", ["nonfinite", "diverged"]),
        ),
    ),
    "parts, going on": (
        PARTS,
        (Row("ln", "ln", [3.0, "interrupted"]), Row("none", "none", ["failed"])),
    ),
    "layers, without a reference": (
        LAYERS,
        (
            Row("ln", "ln", [3.0, "diverged"], 0.0),
            Row("bn-1of2", "bn", ["nonfinite", 5.3], 1.0),
            Row("bn-2of2", "bn", [3.5, 5.4], 2.0),
        ),
    ),
    "parts, all lost": (
        PARTS,
        (Row("ln", "ln", ["diverged"]), Row("none", "none", ["nonfinite"])),
    ),
    "both forms": (
        {"name": "future", "title": "Mask"},
        (
            Row("ln", "ln", [3.0, 3.2]),
            Row("bn", "bn", [3.1, "diverged"]),
            Row("ln-future", "ln", [2.0, 2.2], remark=MARK),
            Row("bn-future", "bn", [1.9, 2.0], remark=MARK),
        ),
    ),
    "a new grid": (GRID | {"name": "new"}, grid_rows(1.0, 2.0, 3.0, 4.0)),
    "a new line": (SIZES | {"name": "new"}, SIZE_ROWS),
    "new dots": ({"name": "new", "title": "New"}, SIZE_ROWS[:1]),
}
SCORED: dict[str, tuple[dict[str, Any], Sequence[Row]]] = {
    "sizes": (SIZES, SIZE_ROWS),
    "sizes, far apart": (SIZES, (Row("a", "bn", [4.99], 64.0), Row("b", "bn", [3.0], 128.0))),
    "layers": (LAYERS, ONE_LAYER),
    "grid": (GRID, grid_rows(3.3, 3.2, 3.1, 3.4)),
    "alphas": (GRID | {"name": "alphas"}, grid_rows(3.3, 3.2, 3.1, 3.4)),
    "parts": (PARTS, TWO_PARTS),
}
"""Studies of a task with a score for which higher is better."""


def said(folder: Path, data: FigureData) -> str:
    """Return the data of the figures, and the captions."""
    captions = texts(section(folder))
    return "\n".join([*data.lines, *filter(None, captions)])


@pytest.mark.parametrize("case", CASES)
def test_what_a_study_shows(
    case: str, tmp_path: Path, figure_data: FigureData, snapshot: SnapshotAssertion
) -> None:
    study, rows = CASES[case]
    assert said(write_study(tmp_path / "s", study, rows), figure_data) == snapshot


@pytest.mark.parametrize("case", SCORED)
def test_a_study_is_about_the_score_of_its_task(
    case: str, tmp_path: Path, figure_data: FigureData, snapshot: SnapshotAssertion
) -> None:
    study, rows = SCORED[case]
    folder = write_study(tmp_path / "s", study, rows, task="translation", score="bleu")
    assert said(folder, figure_data) == snapshot


def test_gaps_compare_runs_of_one_seed(tmp_path: Path, figure_data: FigureData) -> None:
    rows = (Row("ln", "ln", [3.0, 5.0], 0.0), Row("bn-1of1", "bn", [3.1, 5.3], 1.0))
    comparison = read_comparison(write_study(tmp_path / "s", LAYERS, rows))
    lowest_layers(comparison)
    (gap, tid), (gap_in_time, tid_in_time) = figure_data.figures
    gaps = [math.exp(3.1) - math.exp(3.0), math.exp(5.3) - math.exp(5.0)]
    assert gap.bands[0].mean == pytest.approx([0, sum(gaps) / 2])
    assert (gap.bands[0].low, gap.bands[0].high) == (
        pytest.approx([0, gaps[0]]),
        pytest.approx([0, gaps[1]]),
    )
    assert tid.bands[0].x == [1.0], "LayerNorm has none"
    assert tid.bands[0].mean == pytest.approx([(3.1 + 5.3) / 2])
    assert gap_in_time.bands[0].mean == pytest.approx([0.2] * 10)
    assert tid_in_time.bands[0].mean == pytest.approx([2.0] * 10), "of the last layer, in percent"


def test_lost_runs_are_lines_of_their_own(tmp_path: Path, figure_data: FigureData) -> None:
    rows = (
        Row("ln", "ln", [3.0, 3.2]),
        Row("detach-both", "detach", [3.4, "diverged"]),
        Row("none", "none", ["diverged"]),
    )
    folder = write_study(tmp_path / "s", PARTS, rows)
    for name, last in (("none-pre-seed0", "4.3e9"), ("detach-both-pre-seed1", "nan")):
        path = folder / name / METRICS_FILE
        lines = path.read_text(encoding="utf-8").splitlines()[:8]
        cells = lines[-1].split(",")
        cells[5:7] = last, last
        path.write_text("\n".join([*lines[:-1], ",".join(cells)]) + "\n", encoding="utf-8")
    comparison = read_comparison(folder)
    caption = layernorm_parts(comparison)[-1].caption
    assert "shade: their range" in caption
    assert "a cross marks where it broke down" in caption
    training, _ = figure_data.figures[-1]
    ln, both, none = training.bands
    assert ln.mean == pytest.approx([3.1 + 3 / step for step in STEPS])
    assert ln.low == pytest.approx([3.0 + 3 / step for step in STEPS])
    assert both.mean == pytest.approx([3.4 + 3 / step for step in STEPS]), "no jump"
    (lost,) = both.traces
    assert (list(lost.points.index), lost.lost) == ([10, 20, 30, 40, 50, 60, 70], True)
    assert math.isnan(lost.points.iloc[-1])
    assert list(none.x) == []
    assert none.traces[0].points.to_dict()[70] == 4.3e9


LEMMA = "by Lemma 2 of Shen et al. 2020 makes the loss smoother with PowerNormV"


def test_scales(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Their words are those of the norm."""
    rows = [Row(norm, norm, [3.0]) for norm in ("pnv", "pn", "bn", "rbn", "mabn")]
    folder = write_study(tmp_path / "s", {"name": "scales", "title": "S"}, rows)
    deviation = [2.0, 1.0, 1.0]
    for row in rows:
        layers = [
            {"layer": f"layers.{layer}.norm", "weight": weight, "deviation": deviation}
            for layer, weight in enumerate(([1.0, -2.0, 0.0], [1.0, 0.5, 1.0]))
        ]
        write_scales(folder / f"{row.label}-pre-seed0", layers)
    assert [one.caption for one in scales(read_comparison(folder))] == snapshot


def test_deep_models_show_some_of_their_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row("pn", "pn", [3.0])]
    folder = write_study(tmp_path / "s", {"name": "scales", "title": "S"}, rows)
    write_scales(
        folder / "pn-pre-seed0",
        [
            {"layer": f"layers.{i}.x", "weight": [1.0], "deviation": [2.0 if i < 50 else 0.5]}
            for i in range(97)
        ],
    )
    drawn: list[str] = []
    monkeypatch.setattr(
        "powernorm_lab.report.diagnoses._draw_frames",
        lambda layers, *_: drawn.extend(name for name, _ in layers),
    )
    comparison = read_comparison(folder)
    (figure,) = scales(comparison)
    assert len(set(drawn)) == len(drawn) == 12
    assert (drawn[0], drawn[-1]) == ("layers.0.x", "layers.96.x")
    assert "12 of 97 layers are drawn" in figure.caption
    assert "51.55 % of the features" in figure.caption


@pytest.mark.usefixtures("blank_figures")
def test_study_without_results_is_known_by_its_runs(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", SIZES, SIZE_ROWS[:2])
    (folder / "results.json").unlink()
    assert read_comparison(folder).study is None
    run = folder / "bn-64-pre-seed1"
    study = {"x_label": "tokens", "logarithmic": True, "source": "A. Paper 2020"} | SIZES
    with edited(run / "result.json") as result:
        result["study"] = study
    (run / "config.json").write_text(json.dumps({"task": "lm", "data": {"batch_size": 3}}))
    found = read_comparison(folder)
    assert (found.study, found.settings_of) == (study, run.name)
    page = write_report([folder]).read_text(encoding="utf-8")
    assert "<h1>Sizes: lm · micro-batches" in page
    assert "Configuration of the run bn-64-pre-seed1" in page
    assert "Configuration of the comparison" not in page


def test_damaged_scales_are_named(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", {"name": "scales", "title": "S"}, [Row("a", "pn", [1.0])])
    write_scales(folder / "a-pre-seed0", [{"layer": "x", "weight": [1.0, "no"], "deviation": []}])
    with pytest.raises(InputError, match=r"scales.json: layers\[0\].weight\[1\] is 'no'"):
        write_report([folder])


def test_runs_that_go_on_have_their_label(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", SIZES, SIZE_ROWS[:2])
    run = folder / "bn-2of2-pre-seed3"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"norm": "bn", "label": "bn-2of2"}))
    found = read_comparison(folder).runs[-1]
    assert (found.norm, found.name, found.status) == ("bn", "bn-2of2", "unfinished")
    assert "bn-2of2, seed 3: unfinished" in " ".join(texts(section(folder)))


def test_a_run_that_goes_on_has_the_place_of_its_variant(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", SIZES, SIZE_ROWS[:2])
    run = folder / "bn-64-pre-seed7"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"norm": "bn", "label": "bn-64"}))
    points = points_of(read_comparison(folder), metric("test_loss"))
    assert points.loc["bn-64", ["x", "mean", "lost"]].tolist() == [64.0, 4.1, "unfinished"]


def test_a_long_name_leaves_room_for_its_numbers(tmp_path: Path) -> None:
    rows = (Row("ln", "ln", [3.0, 3.1]), Row("a label of many words " * 8, "bn", [3.2, 3.3]))
    study = {"name": "layernorm-parts", "title": "Parts"}
    found = section(write_study(tmp_path / "study", study, rows))
    assert ">a label of…many words <" in found
    (box,) = {float(one) for one in re.findall(r'viewBox="0 0 ([\d.]+) ', found)}
    assert box < 300
