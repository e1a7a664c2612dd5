"""Report of translations: directions of scores, signatures, papers, sentences."""

from dataclasses import replace
from pathlib import Path

import pytest
from lab.tests.report.synthetic import printed
from lab.tests.report.synthetic_translations import (
    AVERAGE,
    LOWERED,
    RECALIBRATED,
    SIGNATURE,
    SOURCE,
    paper_record,
    write_translations,
)
from lab.tests.report.test_page import Elements

from powernorm.errors import InputError
from powernorm_lab.report import (
    Comparison,
    read_comparison,
    render_page,
    summarize,
    write_report,
)
from powernorm_lab.report.comparison_tables import scored_weights, signatures, table_of
from powernorm_lab.report.measures import goal_of
from powernorm_lab.report.page import read_translations
from powernorm_lab.report.paper_tables import paper_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_translations(tmp_path_factory.mktemp("translations") / "verses")


@pytest.fixture(scope="module")
def comparison(folder: Path) -> Comparison:
    return read_comparison(folder)


def texts_of(comparison: Comparison, label: str) -> dict[str, str]:
    table = table_of(comparison, summarize(comparison))
    (line,) = [line for line in table.lines if line[0] == label]
    return dict(zip(table.headings, line, strict=True))


def test_no_percent_of_a_reference_that_is_zero(comparison: Comparison) -> None:
    runs = [
        replace(run, metrics={"test_bleu": 0.0 if run.norm == "ln" else 4.0})
        for run in comparison.runs
    ]
    assert texts_of(replace(comparison, runs=runs), "rbn")["gap to ln"] == "+4.00 ▲"


def test_differing_signatures_name_their_norms(comparison: Comparison) -> None:
    changed = [
        replace(run, signatures={"test_bleu": "other"}) if run.norm == "pn" else run
        for run in comparison.runs
    ]
    lines = signatures(replace(comparison, runs=changed))
    assert ("test BLEU", f"{SIGNATURE} (ln, bn, rbn)") in lines
    assert ("test BLEU", "other (pn)") in lines


def test_scored_weights(comparison: Comparison) -> None:
    assert scored_weights(comparison) == f"Scored: {AVERAGE} (ln); {RECALIBRATED} (bn, rbn, pn)."
    best = [replace(run, scored="best checkpoint") for run in comparison.runs]
    assert scored_weights(replace(comparison, runs=best)) == "Scored: best checkpoint."
    # For a perplexity this is the usual case.
    assert not scored_weights(replace(comparison, runs=best, goal=goal_of("test_perplexity")))
    assert not scored_weights(
        replace(comparison, runs=[replace(run, scored="") for run in comparison.runs])
    )


@pytest.mark.parametrize(
    ("status", "text"), [("diverged", "diverged"), ("failed", "failed"), ("nonfinite", "NaN")]
)
def test_measured_without_a_finished_run_says_why(
    comparison: Comparison, status: str, text: str
) -> None:
    runs = [replace(run, status=status) if run.norm == "bn" else run for run in comparison.runs]
    assert paper_table(replace(comparison, runs=runs)).lines[1][3] == text


def test_measured_of_one_seed(comparison: Comparison) -> None:
    one = replace(comparison, runs=comparison.runs[:1])
    assert paper_table(one).lines[0][3] == "21.50 (1 seed)"


def test_papers_perplexities(comparison: Comparison) -> None:
    record = comparison.paper[0] | {"metric": "test_perplexity", "value": float("inf")}
    line = paper_table(replace(comparison, paper=[record])).lines[0]
    assert (line[2], line[4]) == (f"∞ ({SOURCE})", "test perplexity")


@pytest.mark.usefixtures("blank_figures")
def test_sentence_that_a_norm_did_not_translate(tmp_path: Path) -> None:
    folder = write_translations(tmp_path / "verses")
    path = folder / "bn-pre-seed0" / "translations.tsv"
    path.write_text("source\treference\ttranslation\n" + "a\tb\tc\n", encoding="utf-8")
    page = render_page(read_comparison(folder))
    assert ">bn says" not in page
    assert page.count(">ln says") == 10


@pytest.mark.parametrize(
    "text", ["source\treference\ttranslation\na\tb\tc\nd\te", "a\tb\tc\r\nd\te\tf"]
)
def test_last_line_may_be_half_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "translations.tsv"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_translations(path) == [("a", "b", "c")]


@pytest.mark.usefixtures("blank_figures")
def test_damaged_translations_name_file_and_line(tmp_path: Path) -> None:
    folder = write_translations(tmp_path / "verses")
    path = folder / "ln-pre-seed0" / "translations.tsv"
    path.write_text("source\treference\ttranslation\na\tb\tc\na\tb\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"ln-pre-seed0/translations.tsv, line 3: 2 columns"):
        write_report(folder)


def test_without_the_keys_of_translations(tmp_path: Path) -> None:
    """All keys are optional; without results.json the measure comes from the runs."""
    folder = write_translations(tmp_path / "verses", paper=None, reduced=None)
    comparison = read_comparison(folder)
    assert comparison.metric == "test_bleu"
    assert (list(comparison.paper), comparison.reduced) == ([], "")
    (folder / "results.json").unlink()
    assert read_comparison(folder).metric == "test_bleu"


@pytest.mark.usefixtures("blank_figures")
def test_everything_new_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>x</script>"
    folder = write_translations(
        tmp_path / "verses",
        reduced=hostile,
        paper=[
            {
                "norm": hostile,
                "placement": "pre",
                "dataset": hostile,
                "metric": hostile,
                "value": 1.0,
                "source": hostile,
            }
        ],
    )
    results = folder / "results.json"
    text = results.read_text(encoding="utf-8")
    results.write_text(text.replace(SIGNATURE, hostile).replace(AVERAGE, hostile), encoding="utf-8")
    page = render_page(read_comparison(folder))
    assert Elements(page).all("script") == [{}]
    assert page.count("<script") == 1
    assert page.count("&lt;script&gt;") >= 8


@pytest.mark.parametrize("width", [60, 80, 200])
def test_terminal(folder: Path, comparison: Comparison, width: int) -> None:
    text = printed(folder, width)
    assert max(map(len, text.splitlines())) <= width
    words = text.replace(";", "").split()
    for heading in table_of(comparison, summarize(comparison)).headings:
        assert all(word in words for word in heading.split()), heading
    joined = "".join(words)
    for found in (SIGNATURE, LOWERED, "Areducedverses-small", f"{AVERAGE}(ln)"):
        assert found.replace(" ", "") in joined
    assert ("not run" in text) == (width >= 80)


def test_names_of_norms_are_whole_beside_the_papers(tmp_path: Path) -> None:
    source = "Xu et al. 2019, Tables 1, 2, 4"
    names = ("detach-mean", "detach-both", "ln")
    papers = [paper_record(norm, 35.6, source=source) for norm in names]
    text = printed(write_translations(tmp_path / "verses", paper=papers), 80)
    table = text[text.index("paper and measured") :].split()
    assert {"detach-mean", "detach-both"} <= set(table)
    assert max(map(len, text.splitlines())) <= 80
