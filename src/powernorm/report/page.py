"""The report of a comparison: what stands on its page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from powernorm.report import figures, tables
from powernorm.report.columns import columns_of
from powernorm.report.diagnosis_sections import comparison_contents
from powernorm.report.document import (
    Article,
    SectionParts,
    counted,
    document,
    folded,
    gallery,
    write_page,
)
from powernorm.report.html_tables import (
    copy_blocks,
    glossary,
    run_table,
    settings_table,
    summary_table,
)
from powernorm.report.loading import read_comparison
from powernorm.report.markup import Markup, element
from powernorm.report.numerals import printable
from powernorm.report.paper_tables import difference_note, paper_contents
from powernorm.report.records import Comparison
from powernorm.report.scoring import scoring_notes
from powernorm.report.studies import study_contents
from powernorm.report.summary import SummaryRow, summarize
from powernorm.report.translations import sample_contents
from powernorm.runs import REPORT_FILE

MAX_MAPS: Final = 8
"""Heat maps that are in sight; more are folded away."""


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a comparison folder from the files that lie there.

    Works with partial results: runs that failed or still go on are shown as such.

    Returns:
        The path of the report.

    Raises:
        InputError: `folder` is no comparison, or a file in it is damaged.
    """
    return write_page(render_page(read_comparison(folder)), folder / REPORT_FILE)


def render_page(comparison: Comparison) -> str:
    """The whole page."""
    return document(tables.headline(comparison), [_article(comparison)])


def render_pages(comparisons: Sequence[Comparison]) -> str:
    """One page of several comparisons, each with its own anchor."""
    title = f"{len(comparisons)} comparisons"
    return document(title, [_article(comparison) for comparison in comparisons])


def _article(comparison: Comparison) -> Article:
    return Article(
        heading=f"{_subject(comparison)}: {tables.headline(comparison)}{_place(comparison)}",
        lead=_lead(comparison),
        sections=list(_sections(comparison)),
        anchor=comparison.anchor,
    )


def _place(comparison: Comparison) -> str:
    """What tells comparisons of one page apart."""
    if not comparison.anchor:
        return ""
    return f" ({printable('/'.join(comparison.folder.resolve().parts[-2:]))})"


def _sections(comparison: Comparison) -> Iterator[SectionParts]:
    rows = summarize(comparison)
    study = study_contents(comparison)
    if study:
        yield "study", "The study", study
    paper = paper_contents(comparison)
    yield (
        "results",
        "Results",
        [
            *([] if paper else difference_note(comparison)),
            summary_table(rows, comparison.metric),
            *scoring_notes(comparison),
            _copies(rows, comparison.metric),
        ],
    )
    if paper:
        yield "paper", "Paper and measured", paper
    curves = figures.learning_curves(comparison)
    if curves:
        yield "curves", "Learning curves", [gallery(curves)]
    tid = _tid_contents(comparison)
    if tid:
        yield "tid", "Training inference discrepancy", tid
    gradients = figures.gradients_over_time(comparison)
    if gradients:
        yield "gradients", "Gradients of the norms' inputs", [gallery(gradients)]
    diagnoses = comparison_contents(comparison)
    if diagnoses:
        yield "diagnoses", "Diagnoses", diagnoses
    samples = sample_contents(comparison)
    if samples:
        yield "translations", "Translations", samples
    yield "runs", "Every run", [run_table(comparison)]
    yield "columns", "What the columns mean", [glossary(comparison.metric)]
    if comparison.data:
        yield "data", "Data", [settings_table(comparison.data, "Corpus of the comparison")]
    if comparison.settings:
        yield "settings", "Settings and environment", _settings(comparison)


def _lead(comparison: Comparison) -> str:
    runs = len(comparison.runs)
    noun = "norm" if comparison.study is None else "variant"
    parts = [
        counted(len(comparison.names), noun),
        counted(len({run.seed for run in comparison.runs}), "seed"),
        counted(runs, "run"),
    ]
    text = ", ".join(parts)
    text += f". The same model, data and initial weights for every {noun} of a seed."
    unfinished = sum(not run.finished for run in comparison.runs)
    if unfinished:
        text += f" {unfinished} of {runs} runs did not finish; they are marked."
    return text


def _subject(comparison: Comparison) -> str:
    return "Norms compared" if comparison.study is None else printable(comparison.study["title"])


def _copies(rows: Sequence[SummaryRow], metric: str) -> Markup:
    columns = columns_of(metric)
    return copy_blocks(tables.markdown_table(rows, columns), tables.latex_table(rows, columns))


def _tid_contents(comparison: Comparison) -> list[Markup]:
    contents = []
    lines = figures.tid_over_time(comparison)
    if lines:
        contents.append(gallery(lines))
    maps = figures.tid_heat_maps(comparison)
    if maps:
        first_seed = {run.name: run.seed for run, _ in reversed(maps)}
        shown = [drawn for run, drawn in maps if run.seed == first_seed[run.name]]
        others = [drawn for run, drawn in maps if run.seed != first_seed[run.name]]
        contents += [
            element("h3", "By layer"),
            element(
                "p",
                "Light is a large discrepancy, grey is no number; all maps share one scale.",
                attributes={"class": "soft"},
            ),
            gallery(shown)
            if len(shown) <= MAX_MAPS
            else folded(f"The maps of {len(shown)} runs", gallery(shown)),
        ]
        if others:
            contents.append(folded("The other seeds", gallery(others)))
    return contents


def _settings(comparison: Comparison) -> list[Markup]:
    """Versions and machine apart from the configuration of the experiment."""
    settings = comparison.settings
    of_run = printable(comparison.settings_of)
    title = f"Configuration of the run {of_run}" if of_run else "Configuration of the comparison"
    environment = {
        key: settings[key]
        for key in ("versions", "machine", "date")
        if settings.get(key) is not None
    }
    rest = {key: value for key, value in settings.items() if key not in environment}
    parts = [settings_table(rest, title)]
    if environment:
        parts += [
            element("h3", "Environment"),
            settings_table(environment, "Versions and machine"),
        ]
    return parts
