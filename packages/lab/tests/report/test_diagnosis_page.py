"""Page of a diagnosis: verdict, tables, figures, and omission of empty parts."""

from collections import Counter
from pathlib import Path

import pytest
from lab.tests.report.synthetic_diagnoses import (
    bert_diagnosis,
    small_diagnosis,
    write_diagnosis,
)
from lab.tests.report.test_page import Elements

from powernorm.records import EvaluationRow
from powernorm_lab.report import (
    diagnosis_page,
    render_diagnosis,
    write_diagnosis_page,
    write_report,
)
from powernorm_lab.report.diagnosis_page import evaluation_words, verdict_words


@pytest.fixture(scope="module")
def elements() -> Elements:
    return Elements(render_diagnosis(bert_diagnosis()))


def section_names(elements: Elements) -> list[str | None]:
    return [attributes["id"] for attributes in elements.all("section")]


def test_figures(elements: Elements) -> None:
    # TID, padding; two of batch sizes; evaluation; spectrum, κ, λ; scatters.
    assert len(elements.all("svg")) == 2 + 2 + 1 + 4 + 1
    assert any("5.00 % (bn)" in text for text in elements.texts)


def row(statistics: str, loss: float, tokens: int | None = None) -> EvaluationRow:
    return EvaluationRow(statistics=statistics, tokens=tokens, loss=loss)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("batch", 4.0)], ""),
        ([row("running", 4.5)], "With running statistics the loss is 4.5000."),
        ([row("running", 4.5), row("re-estimated", 4.2)], "4.2000 (-0.3000)."),
        ([row("running", 4.0), row("batch", 4.0, 512)], "no higher than with batch statistics of "),
        (
            [row("running", 4.002), row("batch", 4.0, 512)],
            "less than 0.1 % above that with batch statistics of about 512 predictions (4.0000): "
            "there is no gap to close",
        ),
        (
            [row("running", 4.5), row("re-estimated", 4.6), row("batch", 4.0, 512)],
            "Re-estimation widens the gap by 20 %.",
        ),
        (
            [row("running", 4.5), row("re-estimated", 4.0), row("batch", 4.0), row("batch", 4.2)],
            "Re-estimation closes 100 % of the gap.",
        ),
    ],
)
def test_gap_in_words(rows: list[EvaluationRow], words: str) -> None:
    assert words in evaluation_words(rows)
    assert bool(words) == bool(evaluation_words(rows))


def test_lowest_layer_alone() -> None:
    verdict = bert_diagnosis()["verdict"] | {"lowest": 1}
    assert "the lowest layer to rbn" in verdict_words(verdict)  # type: ignore[arg-type]


def test_few_layers_have_a_line_each() -> None:
    elements = Elements(render_diagnosis(small_diagnosis()))
    assert elements.texts.count("TID by batch size: PowerNormV") == 1
    assert "blocks.0.attention_norm" in elements.texts


def test_page_of_a_file(tmp_path: Path) -> None:
    path = write_diagnosis(tmp_path, small_diagnosis())
    target = write_diagnosis_page(path, tmp_path / "out.html")
    assert target.read_text(encoding="utf-8") == render_diagnosis(small_diagnosis())
    assert sorted(found.name for found in tmp_path.iterdir()) == ["diagnosis.json", "out.html"]


def test_everything_is_escaped() -> None:
    hostile = '<script>&"$\\frac{\x1b[2J\ud800'
    record = bert_diagnosis()
    record["model"] = hostile
    record["notes"] = [hostile]
    record["verdict"]["norm"] = hostile
    record["verdict"]["reasons"] = [hostile]
    record["spectra"][0]["name"] = hostile
    record["scales"][0]["layer"] = hostile
    for layer in record["layers"]:
        layer |= {"layer": hostile + layer["layer"], "norm": hostile, "reason": hostile}
    page = render_diagnosis(record)
    assert Elements(page).all("script") == [{}]
    assert not set(page) & {"\x1b", "\ud800"}


def test_no_layer_at_all() -> None:
    record = small_diagnosis()
    record["layers"], record["batch_sizes"] = [], []
    assert section_names(Elements(render_diagnosis(record))) == ["verdict"]


@pytest.mark.usefixtures("blank_figures")
def test_diagnoses_inside_a_comparison(small_folder: Path) -> None:
    for run in ("ln-pre-seed0", "bn-pre-seed0"):
        write_diagnosis(small_folder / run, small_diagnosis())
    elements = Elements(write_report(small_folder).read_text(encoding="utf-8"))
    assert "diagnoses" in section_names(elements)
    opened = [attributes for attributes in elements.all("details") if "open" in attributes]
    assert len(opened) == 1
    assert "bn-pre-seed0: Keep the norms as they are." in elements.texts
    ids = Counter(attributes["id"] for _, attributes in elements.found if "id" in attributes)
    assert [name for name, number in ids.items() if number > 1] == []


@pytest.mark.usefixtures("blank_figures")
def test_of_many_diagnoses_the_later_have_tables_only(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten figures for each of hundreds of runs would take minutes."""
    monkeypatch.setattr(diagnosis_page, "MAX_DRAWN", 1)
    for run in ("ln-pre-seed0", "bn-pre-seed0"):
        write_diagnosis(small_folder / run, small_diagnosis())
    page = write_report(small_folder).read_text(encoding="utf-8")
    first, second = page.partition('id="diagnoses"')[2].split("bn-pre-seed0: Keep")
    assert "Layers</h3>" in first
    assert "<figure>" in first
    assert "Layers</h3>" in second
    assert "<figure>" not in second.partition("</section>")[0]
    assert "`powernorm report` with this run alone draws its figures" in second
