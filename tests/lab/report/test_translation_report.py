"""The report of translations: scores the right way up, signatures, papers, sentences."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.report.synthetic import printed
from lab.report.synthetic_translations import (
    AVERAGE,
    LOWERED,
    OTHER,
    RECALIBRATED,
    SIGNATURE,
    SOURCE,
    paper_record,
    write_translations,
)
from lab.report.test_page import Elements
from powernorm.errors import InputError
from powernorm.lab.report import (
    Comparison,
    read_comparison,
    render_page,
    summarize,
    write_report,
)
from powernorm.lab.report.columns import columns_of
from powernorm.lab.report.comparison_tables import cells, markdown_table, run_cells, table_of
from powernorm.lab.report.measures import goal_of
from powernorm.lab.report.paper_tables import paper_table
from powernorm.lab.report.records import Translation
from powernorm.lab.report.run_columns import run_columns_of
from powernorm.lab.report.scoring import scored_weights, signatures
from powernorm.lab.report.summary import best_rows
from powernorm.lab.report.translations import first_runs, read_translations


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_translations(tmp_path_factory.mktemp("translations") / "verses")


@pytest.fixture(scope="module")
def comparison(folder: Path) -> Comparison:
    return read_comparison(folder)


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def texts_of(comparison: Comparison, label: str) -> dict[str, str]:
    columns = columns_of(comparison)
    row = next(row for row in summarize(comparison) if row.label == label)
    return dict(zip((column.heading for column in columns), cells(row, columns), strict=True))


def test_columns_of_translations(comparison: Comparison) -> None:
    assert [column.heading for column in columns_of(comparison)] == [
        "norm",
        "parameters",
        "test BLEU",
        "gap to ln",
        "BLEU tokenized",
        "BLEU lower-case",
        "chrF",
        "test loss",
        "TID last, %",
        "TID average, %",
        "tokens/s",
        "decoding tokens/s",
        "runs",
    ]


def test_row_of_a_norm(comparison: Comparison) -> None:
    texts = texts_of(comparison, "rbn")
    assert texts["test BLEU"] == "21.50 ± 1.00"
    assert texts["gap to ln"] == "+0.50 (+2.4 %)"
    assert texts["BLEU tokenized"] == "22.00 ± 1.00"
    assert texts["BLEU lower-case"] == "23.00 ± 1.00"
    assert texts["chrF"] == "43.00 ± 2.00"
    assert texts["test loss"] == "2.10 ± 0.00"
    assert (texts["tokens/s"], texts["decoding tokens/s"]) == ("20.0k", "3.0k")


def test_lost_runs_are_marked_in_every_score(comparison: Comparison) -> None:
    texts = texts_of(comparison, "bn")
    for heading in ("test BLEU", "BLEU tokenized", "BLEU lower-case", "chrF", "test loss"):
        assert texts[heading].endswith(" *")
    assert texts["runs"] == "2 of 3 finished; diverged: seed 1"


def test_copy_has_scores_and_unigram_none(comparison: Comparison) -> None:
    assert texts_of(comparison, "copy")["test BLEU"] == "0.30"
    assert texts_of(comparison, "copy")["chrF"] == "17.00"
    assert texts_of(comparison, "unigram")["test BLEU"] == "–"


def test_best_is_the_highest_score_of_a_norm_all_of_whose_runs_finished(
    comparison: Comparison,
) -> None:
    # pn's mean is 21.5, too, but lost a seed; a lower perplexity would win as such.
    rows = summarize(comparison)
    assert best_rows(rows, comparison.measure) == {"rbn"}
    assert best_rows([row for row in rows if not row.is_baseline]) == {"ln"}


def test_no_percent_of_a_reference_that_is_zero(comparison: Comparison) -> None:
    runs = [
        replace(run, metrics={"test_bleu": 0.0 if run.norm == "ln" else 4.0})
        for run in comparison.runs
    ]
    assert texts_of(replace(comparison, runs=runs), "rbn")["gap to ln"] == "+4.00"


def test_every_run_has_all_scores(comparison: Comparison) -> None:
    columns = run_columns_of(comparison)
    texts = dict(
        zip([one.heading for one in columns], run_cells(comparison.runs[0], columns), strict=True)
    )
    assert texts["test BLEU"] == "20.00"
    assert texts["chrF"] == "40.00"
    assert texts["valid perplexity"] == "7.39"
    assert texts["decoding tokens/s"] == "3.0k"


def test_copies_have_the_same_columns(comparison: Comparison) -> None:
    rows, columns = summarize(comparison), columns_of(comparison)
    assert markdown_table(rows, columns).startswith("| norm | parameters | test BLEU |")
    assert "21.50 $\\pm$ 1.00" in table_of(rows, columns).latex()


def test_signatures_stand_once_and_in_full(comparison: Comparison, page: str) -> None:
    assert signatures(comparison) == [("test BLEU", SIGNATURE), ("BLEU lower-case", LOWERED)]
    assert page.count(SIGNATURE) == page.count(LOWERED) == 1


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
    # Of a perplexity it goes without saying.
    assert not scored_weights(replace(comparison, runs=best, goal=goal_of("test_perplexity")))
    assert not scored_weights(
        replace(comparison, runs=[replace(run, scored="") for run in comparison.runs])
    )


def test_paper_and_measured(comparison: Comparison) -> None:
    dataset, lowered = "IWSLT14 De-En", "BLEU lower-case"
    assert paper_table(comparison).lines == [
        ["ln", "pre", f"35.5 ({SOURCE}); 35.25 ({OTHER})", "22.50 ± 1.00 (3 seeds)",
         lowered, dataset],
        ["bn", "pre", f"34.4 ({SOURCE})", "21.00 ± 1.41 (2 of 3 seeds)", lowered, dataset],
        ["pn", "pre", f"35.9 ({SOURCE})", "23.00 ± 0.71 (2 of 3 seeds)", lowered, dataset],
        ["rbn", "pre", f"35.6 ({OTHER})", "22.00 ± 1.00 (3 seeds)", "BLEU tokenized", dataset],
        ["mabn", "pre", f"0, failed ({OTHER})", "not run", lowered, dataset],
        ["none", "pre", f"diverged ({SOURCE})", "not run", lowered, dataset],
        ["ln", "post", f"35.5 ({SOURCE})", "not run", lowered, dataset],
    ]  # fmt: skip


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


def test_sections_of_the_page(page: str) -> None:
    elements = Elements(page)
    assert [attributes["id"] for attributes in elements.all("section")] == [
        "results",
        "seeds",
        "paper",
        "curves",
        "translations",
        "runs",
        "columns",
        "data",
        "settings",
    ]
    text = " ".join(elements.texts)
    assert "The test BLEU and other scores, higher is better; the best mean is shaded." in text
    assert "A reduced verses-small." in text
    assert "perplexity per subword" in text
    best = re.findall(r'<tr class="best"><th scope="row">([^<]*)', page)
    assert best == ["rbn"]


def test_paper_table_can_be_copied(page: str) -> None:
    assert "| norm | placement | paper | measured | measure | paper&#39;s data |" in page
    assert (
        "norm &amp; placement &amp; paper &amp; measured &amp; measure &amp; paper&#39;s data"
        in page
    )


@pytest.mark.usefixtures("blank_figures")
def test_differences_without_numbers_of_papers(tmp_path: Path) -> None:
    folder = write_translations(tmp_path / "verses", paper=None)
    page = render_page(read_comparison(folder))
    assert page.count('<p class="reduced">A reduced verses-small.') == 1
    section = page[page.index('<section id="results">') :]
    assert "A reduced verses-small." in section[: section.index("</section>")]
    assert 'id="paper"' not in page
    text = printed(folder, 80)
    assert text.count("A reduced verses-small.") == 1
    assert "paper and measured" not in text


def test_differences_stand_once(folder: Path, page: str) -> None:
    assert page.count('<p class="reduced">') == 1
    section = page[page.index('<section id="paper">') :]
    assert "A reduced verses-small." in section[: section.index("</section>")]
    assert printed(folder, 80).count("A reduced verses-small.") == 1


def test_glossary_says_which_score_papers_report(page: str) -> None:
    assert "cased, as Wang et al. 2022 report it, and Shen et al. 2020 of WMT14" in page
    assert "lower case, as Shen et al. 2020 report it of IWSLT14" in page


def test_sample_of_translations(page: str) -> None:
    section = page[page.index('<section id="translations">') :]
    section = section[: section.index("</section>")]
    assert section.count("<li>") == 10
    assert "<details><summary>10 sentences of the test text" in section
    # Evenly spaced, of every norm, escaped.
    for number in range(0, 40, 4):
        for norm in ("ln", "bn", "rbn", "pn"):
            assert f"{norm} says &lt;i&gt;evening&lt;/i&gt; &amp; day {number}<" in section
    assert "day 1<" not in section


@pytest.mark.usefixtures("blank_figures")
def test_sentence_that_a_norm_did_not_translate(tmp_path: Path) -> None:
    folder = write_translations(tmp_path / "verses")
    path = folder / "bn-pre-seed0" / "translations.tsv"
    path.write_text("source\treference\ttranslation\n" + "a\tb\tc\n", encoding="utf-8")
    page = render_page(read_comparison(folder))
    assert ">bn says" not in page
    assert page.count(">ln says") == 10


def test_first_runs(comparison: Comparison) -> None:
    assert [run.folder for run in first_runs(comparison.runs)] == [
        f"{norm}-pre-seed0" for norm in ("ln", "bn", "rbn", "pn")
    ]


@pytest.mark.parametrize(
    "text", ["source\treference\ttranslation\na\tb\tc\nd\te", "a\tb\tc\r\nd\te\tf"]
)
def test_last_line_may_be_half_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "translations.tsv"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_translations(path) == [Translation("a", "b", "c")]


@pytest.mark.usefixtures("blank_figures")
def test_damaged_translations_name_file_and_line(tmp_path: Path) -> None:
    folder = write_translations(tmp_path / "verses")
    path = folder / "ln-pre-seed0" / "translations.tsv"
    path.write_text("source\treference\ttranslation\na\tb\tc\na\tb\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"ln-pre-seed0/translations.tsv, line 3: 2 columns"):
        write_report(folder)


def test_without_the_keys_of_translations(tmp_path: Path) -> None:
    """They are missed by nothing; without results.json the measure is seen from the runs."""
    folder = write_translations(tmp_path / "verses", paper=None, reduced=None)
    comparison = read_comparison(folder)
    assert comparison.metric == "test_bleu"
    assert (list(comparison.paper), comparison.reduced) == ([], "")
    (folder / "results.json").unlink()
    assert read_comparison(folder).metric == "test_bleu"


@pytest.mark.usefixtures("blank_figures")
def test_perplexity_stays_the_measure_of_the_others(small_folder: Path) -> None:
    comparison = read_comparison(small_folder)
    assert comparison.metric == "test_perplexity"
    page = render_page(comparison)
    for word in ("BLEU", "Paper and measured", "Scored", "Signatures"):
        assert word not in page


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"goal": None}, "goal is missing"),
        ({"paper": [{"norm": "ln"}]}, r"paper\[0\].placement is missing"),
        ({"reduced": 3}, "reduced is 3, expected a string"),
    ],
)
def test_damaged_keys_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = write_translations(tmp_path / "verses", **changes)
    with pytest.raises(InputError, match=words):
        read_comparison(folder)


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
    words = text.split()
    for column in columns_of(comparison):
        assert all(word in words for word in column.heading.split()), column.heading
    joined = "".join(words)
    for found in (SIGNATURE, LOWERED, "notrun", "Areducedverses-small", f"{AVERAGE}(ln)"):
        assert found.replace(" ", "") in joined


def test_names_of_norms_are_whole_beside_the_papers(tmp_path: Path) -> None:
    source = "Xu et al. 2019, Tables 1, 2, 4"
    names = ("detach-mean", "detach-both", "ln")
    papers = [paper_record(norm, 35.6, source=source) for norm in names]
    text = printed(write_translations(tmp_path / "verses", paper=papers), 80)
    table = text[text.index("paper and measured") :].split()
    assert {"detach-mean", "detach-both"} <= set(table)
    assert max(map(len, text.splitlines())) <= 80
