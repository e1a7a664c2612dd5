"""Overlays of several diagnoses: numbers of the lines, and texts of the page."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.report.conftest import FigureData
from lab.tests.report.synthetic import made_run
from lab.tests.report.synthetic_diagnoses import bert_diagnosis, small_diagnosis
from lab.tests.report.test_page import Elements
from pandas import DataFrame
from syrupy.assertion import SnapshotAssertion

from powernorm.records import NORMS_COLUMNS, DiagnosisRecord, SpectrumRecord
from powernorm_lab.report import overlays, read_comparison, render_page
from powernorm_lab.report.overlays import (
    OverlayLine,
    lines_of,
    write_overlay_csv,
)
from powernorm_lab.report.records import ReportedRun
from powernorm_lab.runs import DIAGNOSES_FILE

NAMES = ("one", "two", "three", "four", "five", "six")


def diagnosis(factor: float = 1.0, step: int | None = None, **changes: Any) -> DiagnosisRecord:
    """Return six norms; TID, in percent, and κ are the layer's number times the factor."""
    template = small_diagnosis()["layers"][0]
    layers = [
        {
            **template,
            "layer": name,
            "mean_tid": factor * number / 100,
            "var_tid": factor * number / 50,
            **dict.fromkeys(("kappa_20", "kappa_50", "kappa_80", "lambda_1"), factor * number),
        }
        for number, name in enumerate(NAMES, start=1)
    ]
    record = small_diagnosis() | DiagnosisRecord(  # type: ignore[typeddict-item]
        layers=layers, step=step, spectra=[SpectrumRecord(name="embedding", values=[1.0, 0.5, 0.5])]
    )
    if step is not None:
        record["epoch"] = step / 10
    return record | changes  # type: ignore[return-value]


def test_seeds_are_a_mean_and_a_range_by_layer(figure_data: FigureData) -> None:
    lines = lines_of(
        [
            made_run("ln", 0, diagnosis=diagnosis(10)),
            made_run("bn", 0, diagnosis=diagnosis(1)),
            made_run("bn", 1, diagnosis=diagnosis(3)),
        ]
    )
    assert len(overlays.by_layer(lines, "")) == 6
    layers, (ln, bn) = figure_data.rows["TID: mean by layer"]
    assert layers == list(NAMES)
    assert (ln.label, bn.label) == ("ln", "bn")
    assert ln.mean == pytest.approx([10, 20, 30, 40, 50, 60])
    assert not ln.low
    assert bn.mean == pytest.approx([2, 4, 6, 8, 10, 12])
    assert bn.low == pytest.approx([1, 2, 3, 4, 5, 6])
    assert bn.high == pytest.approx([3, 6, 9, 12, 15, 18])


def test_a_seed_that_broke_down_is_no_part_of_a_mean(figure_data: FigureData) -> None:
    broken = replace(
        made_run("bn", 1, diagnosis=diagnosis(9), diagnoses=[diagnosis(7, 0), diagnosis(9, 5)]),
        status="nonfinite",
    )
    sound = made_run("bn", 0, diagnosis=diagnosis(1), diagnoses=[diagnosis(1, 0), diagnosis(2, 10)])
    lines = lines_of([sound, broken])
    overlays.by_layer(lines, "")
    assert figure_data.rows["κ 20 % by layer"][1][0].mean == [1, 2, 3, 4, 5, 6]
    figures = overlays.over_training(lines, "")
    (band,) = figure_data.panels["κ 20 %, six"].bands
    assert (band.x, band.mean) == ([0, 10], [6, 12])
    (trace,) = band.traces
    assert (dict(trace.points), trace.lost) == ({0: 42, 5: 54}, True)
    assert "a cross marks where it broke down" in figures[0].caption


def test_over_training_average_and_last_layer_and_those_of_the_paper(
    figure_data: FigureData,
) -> None:
    """Wang et al. 2022, Fig. 6: of six layers κ of 2, 4 and 6."""
    lines = lines_of(
        [
            made_run("ln", 0, diagnoses=[diagnosis(1, 0), diagnosis(2, 10), diagnosis(4, 20)]),
            made_run("bn", 0, diagnoses=[diagnosis(1, 0), diagnosis(3, 10)]),
            made_run("bn", 1, diagnoses=[diagnosis(2, 0), diagnosis(5, 10)]),
        ]
    )
    captions = " ".join(figure.caption for figure in overlays.over_training(lines, ""))
    assert "An epoch is 10 steps." in captions
    ln, bn = figure_data.panels["TID: mean, average of 6 norms"].bands
    assert (ln.x, ln.mean) == ([0, 10, 20], pytest.approx([3.5, 7, 14]))
    assert (bn.x, bn.mean) == ([0, 10], pytest.approx([1.5 * 3.5, 4 * 3.5]))
    assert (bn.low, bn.high) == (pytest.approx([3.5, 10.5]), pytest.approx([7, 17.5]))
    last = figure_data.panels["TID: deviation, six, the last"].bands[0]
    assert last.mean == pytest.approx([12, 24, 48])
    kappas = [title for title in figure_data.panels if title.startswith("κ 50 %")]
    assert kappas == ["κ 50 %, two", "κ 50 %, four", "κ 50 %, six"]
    assert figure_data.panels["σ at 50 % of the dimensions"].bands[0].mean == [0.5, 0.5, 0.5]


def test_columns_of_the_monitor_are_of_the_norms_that_are_compared(figure_data: FigureData) -> None:
    """This holds for a decoder that keeps LayerNorm, too; the first of the layers is named."""

    def run(norm: str) -> ReportedRun:
        layers = {"encoder.0": norm, "encoder.1": norm, "decoder.0": "ln"}
        rows = [
            {
                "step": step,
                "layer": layer,
                "norm": own,
                "gradient_norm": value,
                "input_scale": scale,
            }
            for step in (1, 2)
            for layer, own in layers.items()
            for value in [9.0 if layer == "decoder.0" else step]
            for scale in [value + 10 * int(layer[-1])]
        ]
        samples = DataFrame(rows).reindex(columns=NORMS_COLUMNS)
        samples["token_gradient_var"] = samples["gradient_norm"]
        return made_run(norm, 0, samples=samples)

    drawn = overlays.monitored(lines_of([run("ln"), run("bn")]), "")
    captions = {figure.caption.partition(",")[0]: figure.caption for figure in drawn}
    for title in ("Gradient variance per token", "Input gradient, first layer"):
        assert [band.mean for band in figure_data.panels[title].bands] == [[1, 2], [1, 2]]
    assert (
        "The layer: encoder.0."
        in captions["Norm of the whole gradient of the first norm layer's input"]
    )
    title = "Scale of the last norm's input"
    assert [band.mean for band in figure_data.panels[title].bands] == [[11, 12], [11, 12]]
    scale = captions["Root mean square of the last norm layer's input over valid tokens"]
    assert "The layer: encoder.1." in scale
    assert "Over 2 of 3 norm layers" in captions["Variance over features of the input gradient"]


def test_figures_of_several_models(
    figure_data: FigureData, comparison_folder: Path, snapshot: SnapshotAssertion
) -> None:
    """A decoder that keeps LayerNorm is left out; layers of one model have gaps for the others."""

    def encoder(norm: str, factor: float, step: int) -> DiagnosisRecord:
        record = diagnosis(factor, step)
        for number, row in enumerate(record["layers"]):
            row["norm"] = norm if number < 4 else "ln"
        return record

    made = [
        made_run(norm, 0, diagnoses=[encoder(norm, 1, 0), encoder(norm, 2, 10)])
        for norm in ("ln", "bn")
    ]
    made.append(made_run("pn", 0, diagnoses=[diagnosis(1, 0)]))
    models = [OverlayLine("a", [diagnosis()]), OverlayLine("small", [small_diagnosis()])]
    drawn = [
        *overlays.by_layer(models, ""),
        *overlays.spectra([*models, OverlayLine("bert", [bert_diagnosis()])], ""),
        *overlays.over_training(lines_of(made), ""),
        *overlays.every_layer(lines_of(made), ""),
        *overlays.monitored(lines_of(read_comparison(comparison_folder).runs), ""),
    ]
    lines = (line[:400] for line in figure_data.lines)
    assert "\n".join([*lines, *(one.caption for one in drawn)]) == snapshot


def write_diagnoses(folder: Path, records: list[DiagnosisRecord]) -> None:
    lines = (json.dumps(record) + "\n" for record in records)
    (folder / DIAGNOSES_FILE).write_text("".join(lines))


@pytest.mark.usefixtures("blank_figures")
def test_the_page_of_a_comparison_shows_what_its_runs_recorded(comparison_folder: Path) -> None:
    def sections() -> list[str | None]:
        page = Elements(render_page(read_comparison(comparison_folder)))
        return [attributes["id"] for attributes in page.all("section")]

    assert "diagnosed" not in sections()
    failed = diagnosis(1, 10, layers=[], notes=["the input of one holds NaN"])
    write_diagnoses(comparison_folder / "bn-pre-seed0", [diagnosis(1, 0), diagnosis(2, 5), failed])
    assert "diagnosed" in sections()
    text = " ".join(Elements(render_page(read_comparison(comparison_folder))).texts)
    assert "bn-pre-seed0, step 10: the input of one holds NaN" in text


def test_counts_and_indices_of_the_table_have_no_fraction(tmp_path: Path) -> None:
    record = diagnosis()
    counts = {"num_outliers": 2, "outlier_feature": 3, "top_position": 0, "sink_feature": 5}
    record["layers"][1] |= counts
    write_overlay_csv([OverlayLine("a", [record])], tmp_path / "layers.csv")
    with (tmp_path / "layers.csv").open(newline="") as file:
        first, second, *_ = csv.DictReader(file)
    assert {name: first[name] for name in counts} == dict.fromkeys(counts, "")
    assert {name: int(second[name]) for name in counts} == counts
    assert float(second["mean_tid"]) == 0.02
