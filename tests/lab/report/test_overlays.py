"""Several diagnoses in one picture: which line has which numbers, and what the page says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from lab.report.synthetic import made_run, write_comparison
from lab.report.synthetic_diagnoses import bert_diagnosis, small_diagnosis
from lab.report.test_page import Elements
from powernorm.errors import InputError
from powernorm.lab.report import overlays, read_comparison, render_page
from powernorm.lab.report.curves import Series
from powernorm.lab.report.lines import Panel
from powernorm.lab.report.loading import read_diagnoses
from powernorm.lab.report.overlay_page import overlay_table, render_overlay
from powernorm.lab.report.overlays import KAPPAS, TIDS, OverlayLine, lines_of
from powernorm.lab.report.profiles import Profile
from powernorm.lab.report.records import Comparison
from powernorm.runs import DIAGNOSES_FILE, DIAGNOSIS_FILE, DiagnosisRecord, SpectrumRecord

NAMES = ("one", "two", "three", "four", "five", "six")


def diagnosis(factor: float = 1.0, step: int | None = None, **changes: Any) -> DiagnosisRecord:
    """Six norms; the number of a layer times the factor is its TID, in percent, and its κ."""
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


class Drawn:
    """Catches what would be drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.panels: dict[str, Panel] = {}
        self.profiles: dict[str, tuple[list[str], list[Profile]]] = {}

        def draw_panels(panels: list[Panel], **options: Any) -> Markup:
            assert options["x_label"] in ("step", "index")
            self.panels |= {panel.title: panel for panel in panels}
            return Markup("<svg></svg>")

        def draw_profiles(
            layers: list[str], profiles: list[Profile], *, title: str, **_: Any
        ) -> Markup:
            self.profiles[title] = (layers, profiles)
            return Markup("<svg></svg>")

        monkeypatch.setattr(overlays, "draw_panels", draw_panels)
        monkeypatch.setattr(overlays, "draw_profiles", draw_profiles)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(monkeypatch)


def test_seeds_are_a_mean_and_a_range_by_layer(drawn: Drawn) -> None:
    lines = lines_of(
        [
            made_run("ln", 0, diagnosis=diagnosis(10)),
            made_run("bn", 0, diagnosis=diagnosis(1)),
            made_run("bn", 1, diagnosis=diagnosis(3)),
        ]
    )
    assert len(overlays.by_layer(lines, "")) == 6
    layers, (ln, bn) = drawn.profiles["TID: mean by layer"]
    assert layers == list(NAMES)
    assert (ln.label, bn.label) == ("ln", "bn")
    assert ln.values == pytest.approx([10, 20, 30, 40, 50, 60])
    assert not ln.low
    assert bn.values == pytest.approx([2, 4, 6, 8, 10, 12])
    assert bn.low == pytest.approx([1, 2, 3, 4, 5, 6])
    assert bn.high == pytest.approx([3, 6, 9, 12, 15, 18])


def test_a_seed_that_broke_down_is_no_part_of_a_mean(drawn: Drawn) -> None:
    broken = replace(
        made_run("bn", 1, diagnosis=diagnosis(9), diagnoses=[diagnosis(7, 0), diagnosis(9, 5)]),
        status="nonfinite",
    )
    sound = made_run("bn", 0, diagnosis=diagnosis(1), diagnoses=[diagnosis(1, 0), diagnosis(2, 10)])
    lines = lines_of([sound, broken])
    overlays.by_layer(lines, "")
    assert drawn.profiles["κ 20 % by layer"][1][0].values == [1, 2, 3, 4, 5, 6]
    figures = overlays.over_training(lines, "")
    (band,) = drawn.panels["κ 20 %, six"].bands
    assert (band.x, band.mean) == ([0, 10], [6, 12])
    (trace,) = band.traces
    assert (list(trace.x), list(trace.y), trace.lost) == ([0, 5], [42, 54], True)
    assert "a run that broke down" in figures[0].caption


def test_layers_that_only_one_model_has(drawn: Drawn) -> None:
    """Of models of unlike architecture: every layer has a row, the others have a gap there."""
    lines = [OverlayLine("a", [diagnosis()]), OverlayLine("bert", [bert_diagnosis()])]
    overlays.by_layer(lines, "")
    layers, (first, second) = drawn.profiles["λ₁ by layer"]
    assert layers[: len(NAMES)] == list(NAMES)
    assert len(layers) == len(NAMES) + len(bert_diagnosis()["layers"])
    assert first.values[len(NAMES) :] == [None] * len(bert_diagnosis()["layers"])
    assert second.values[: len(NAMES)] == [None] * len(NAMES)


def test_over_training_average_and_last_layer_and_those_of_the_paper(drawn: Drawn) -> None:
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
    ln, bn = drawn.panels["TID: mean, average of 6 norms"].bands
    assert (ln.x, ln.mean) == ([0, 10, 20], pytest.approx([3.5, 7, 14]))
    assert (bn.x, bn.mean) == ([0, 10], pytest.approx([1.5 * 3.5, 4 * 3.5]))
    assert (bn.low, bn.high) == (pytest.approx([3.5, 10.5]), pytest.approx([7, 17.5]))
    last = drawn.panels["TID: deviation, six, the last"].bands[0]
    assert last.mean == pytest.approx([12, 24, 48])
    kappas = [title for title in drawn.panels if title.startswith("κ 50 %")]
    assert kappas == ["κ 50 %, two", "κ 50 %, four", "κ 50 %, six"]
    assert drawn.panels["σ at 50 % of the dimensions"].bands[0].mean == [0.5, 0.5, 0.5]


def test_over_training_is_of_the_norms_that_are_compared(drawn: Drawn) -> None:
    """As in a translation model, whose decoder keeps LayerNorm and has the last norms."""

    def with_norm(norm: str, factor: float, step: int) -> DiagnosisRecord:
        record = diagnosis(factor, step)
        for number, row in enumerate(record["layers"]):
            row["norm"] = norm if number < 4 else "ln"
        return record

    lines = lines_of(
        [
            made_run(norm, 0, diagnoses=[with_norm(norm, 1, 0), with_norm(norm, 2, 10)])
            for norm in ("ln", "bn")
        ]
    )
    overlays.over_training(lines, "")
    for band in drawn.panels["TID: mean, average of 4 norms"].bands:
        assert band.mean == pytest.approx([2.5, 5])
    assert drawn.panels["TID: mean, four, the last"].bands[1].mean == pytest.approx([4, 8])
    kappas = [title for title in drawn.panels if title.startswith("κ 50 %")]
    assert kappas == ["κ 50 %, two", "κ 50 %, three", "κ 50 %, four"]


def test_every_layer_has_a_figure(drawn: Drawn) -> None:
    lines = lines_of([made_run("bn", 0, diagnoses=[diagnosis(1, 0), diagnosis(3, 10)])])
    figures = overlays.every_layer(lines, "")
    assert [figure.caption.partition(",")[0] for figure in figures] == list(NAMES)
    assert drawn.panels[TIDS[0].name].bands[0].mean == pytest.approx([6, 18])
    assert drawn.panels[KAPPAS[1].name].bands[0].mean == [6, 18]


def test_spectra_and_their_cumulative_share(drawn: Drawn) -> None:
    (figure,) = overlays.spectra([OverlayLine("ln", [diagnosis()])], "")
    assert "Shen et al. 2020, Fig. 6" in figure.caption
    assert drawn.panels["Singular values"].bands[0].mean == [1.0, 0.5, 0.5]
    assert drawn.panels["Cumulative"].bands[0].mean == pytest.approx([0.5, 0.75, 1.0])
    drawn.panels.clear()
    # Models with several have a figure for each, by name.
    overlays.spectra([OverlayLine("bert", [bert_diagnosis()])], "")
    assert any("word_embeddings" in title for title in drawn.panels)
    assert any("position_embeddings" in title for title in drawn.panels)


def test_gradient_parts_are_those_of_the_monitor(drawn: Drawn, comparison_folder: Path) -> None:
    comparison = read_comparison(comparison_folder)
    overlays.monitored(lines_of(comparison.runs), "")
    panel = drawn.panels["Gradient through the variance"]
    assert [band.label for band in panel.bands] == ["bn", "rbn", "pn"]
    rbn = panel.bands[1]
    assert len(rbn.x) == len(rbn.mean) == len(rbn.low)
    assert all(
        low <= value <= high for low, value, high in zip(rbn.low, rbn.mean, rbn.high, strict=True)
    )
    assert "Fluctuation of the variance" in drawn.panels


def test_a_single_diagnosis_is_no_line_over_training(drawn: Drawn) -> None:
    lines = lines_of([made_run("bn", 0, diagnoses=[diagnosis(1, 0)])])
    assert overlays.over_training(lines, "") == []
    assert not drawn.panels


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


@pytest.mark.usefixtures("blank_figures")
def test_a_page_with_everything(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "small", norms=("ln", "rbn"), seeds=(0, 1))
    for place in folder.glob("*-pre-seed*"):
        (place / DIAGNOSIS_FILE).write_text(json.dumps(diagnosis(1, 30)))
        write_diagnoses(place, [diagnosis(1, 0), diagnosis(2, 30)])
    comparison: Comparison = read_comparison(folder)
    lines = lines_of(comparison.runs)
    page = Elements(render_overlay(lines))
    names = [attributes["id"] for attributes in page.all("section")]
    assert names == ["models", "training", "layers", "gradients", "spectra"]
    assert len(overlay_table(lines).lines) == 4
    ids = [attributes["id"] for attributes in page.all("svg") if attributes.get("id")]
    assert len(ids) == len(set(ids))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / DIAGNOSES_FILE
    assert read_diagnoses(file) == []
    write_diagnoses(tmp_path, [diagnosis(1, 0)])
    whole = file.read_text()
    assert [record["epoch"] for record in read_diagnoses(file)] == [0]
    # A line that is still being written.
    file.write_text(whole + '{"format": 1')
    assert len(read_diagnoses(file)) == 1
    for damaged, words in (
        ("[]\n", "diagnoses.jsonl, line 2: the file is .., expected an object"),
        ("no json\n", "diagnoses.jsonl, line 2: not JSON"),
        ('{"format": 9}\n', "line 2: format is 9, this version reads 1"),
        (whole.replace('"num_tokens"', '"tokens"'), "line 2: num_tokens is missing"),
    ):
        file.write_text(whole + damaged)
        with pytest.raises(InputError, match=words.replace("[", r"\[")):
            read_diagnoses(file)


def test_a_band_skips_numbers_that_are_not_finite() -> None:
    band = overlays._band(0, "bn", [Series("bn", [0, 1], [float("nan"), 2.0])])
    assert band is not None
    assert (band.x, band.mean) == ([1], [2.0])
