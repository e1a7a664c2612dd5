"""The report of a comparison: what stands on its page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from markupsafe import Markup

from powernorm.lab.report import figures
from powernorm.lab.report.changes import changes_table, difference_note, preset_values
from powernorm.lab.report.columns import MAX_METRICS, own_metric
from powernorm.lab.report.comparison_tables import (
    glossary,
    headline,
    run_table,
    scoring_notes,
    settings_table,
    summary_table,
    table_of,
)
from powernorm.lab.report.conclusion import conclusion, race_contents
from powernorm.lab.report.diagnosis_page import comparison_contents
from powernorm.lab.report.document import Article, SectionParts, document, part, write_page
from powernorm.lab.report.loading import read_comparison
from powernorm.lab.report.measures import own_heading
from powernorm.lab.report.numerals import counted, printable
from powernorm.lab.report.overlay_page import training_contents
from powernorm.lab.report.overlays import lines_of
from powernorm.lab.report.paper_tables import paper_contents, paper_table, score_contents
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.seed_statistics import seed_contents, seed_table
from powernorm.lab.report.statistics import SummaryRow, summarize
from powernorm.lab.report.studies import study_contents
from powernorm.lab.report.tables import Table, copies
from powernorm.lab.report.translations import sample_contents
from powernorm.lab.report.tuning import tuning_contents, tuning_sentence
from powernorm.runs import METRICS_FILE, REPORT_FILE

MAX_MAPS: Final = 8
"""Heat maps that are in sight; more are folded away."""
MAX_LINES: Final = 100
"""Metrics or columns that are named beyond those with a place of their own."""


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
    return document(headline(comparison), [_article(comparison)])


def render_pages(comparisons: Sequence[Comparison]) -> str:
    """One page of several comparisons, each with its own anchor."""
    title = f"{len(comparisons)} comparisons"
    return document(title, [_article(comparison) for comparison in comparisons])


def tables_of(comparison: Comparison) -> dict[str, Table]:
    """Return the tables of a comparison that have something to say, by name."""
    rows = summarize(comparison)
    seeds = seed_table(comparison, rows)
    changes = comparison.changes
    return {
        "results": table_of(comparison, rows),
        "runs": run_table(comparison),
        **({} if seeds is None else {"seeds": seeds}),
        **({"paper": paper_table(comparison)} if comparison.paper else {}),
        **({} if changes is None else {"settings": changes_table(changes)}),
    }


def _article(comparison: Comparison) -> Article:
    return Article(
        heading=f"{_subject(comparison)}: {headline(comparison)}{_place(comparison)}",
        lead=_lead(comparison),
        sections=list(_sections(comparison)),
        anchor=comparison.anchor,
        conclusion=conclusion(comparison),
    )


def _place(comparison: Comparison) -> str:
    """What tells comparisons of one page apart."""
    if not comparison.anchor:
        return ""
    return f" ({printable('/'.join(comparison.folder.resolve().parts[-2:]))})"


def _sections(comparison: Comparison) -> Iterator[SectionParts]:
    rows = summarize(comparison)
    results = table_of(comparison, rows)
    study = study_contents(comparison)
    if study:
        yield "study", "The study", study
    paper = paper_contents(comparison)
    yield (
        "results",
        "Results",
        [
            *([] if paper else difference_note(comparison)),
            summary_table(comparison, rows),
            *_more_metrics(comparison, rows),
            *scoring_notes(comparison),
            copies(results),
        ],
    )
    tuning = tuning_contents(comparison)
    if tuning:
        yield "tuning", "How the settings were chosen", tuning
    race = race_contents(comparison)
    if race:
        yield "race", "The race", race
    seeds = seed_contents(comparison, rows)
    if seeds:
        yield "seeds", "What the seeds say", seeds
    if paper:
        yield "paper", "Paper and measured", paper
    curves = figures.learning_curves(comparison)
    if curves:
        yield "curves", "Learning curves", [part("gallery", curves), *_more_curves(comparison)]
    tid = _tid_contents(comparison)
    if tid:
        yield "tid", "Training inference discrepancy", tid
    yield from _found_in_runs(comparison)
    yield (
        "runs",
        "Every run",
        [run_table(comparison).html("Every run", "One row a run, nothing averaged.")],
    )
    yield "columns", "What the columns mean", [glossary(results)]
    if comparison.data:
        yield "data", "Data", [settings_table(comparison.data, "Corpus of the comparison")]
    if comparison.settings or comparison.function:
        yield "settings", "Settings and environment", _settings(comparison)


def _found_in_runs(comparison: Comparison) -> Iterator[SectionParts]:
    """What only some comparisons have."""
    gradients = figures.gradients_over_time(comparison)
    prefix = f"{comparison.anchor}diagnosed-"
    sections: Sequence[SectionParts] = (
        (
            "gradients",
            "Gradients of the norms' inputs",
            [part("gallery", gradients)] if gradients else [],
        ),
        (
            "diagnosed",
            "Diagnoses through training",
            training_contents(lines_of(comparison.runs), prefix),
        ),
        ("statistics", "Scores by kind of statistics", score_contents(comparison)),
        ("diagnoses", "Diagnoses", comparison_contents(comparison)),
        ("translations", "Translations", sample_contents(comparison)),
    )
    for name, heading, contents in sections:
        if contents:
            yield name, heading, contents


def _lead(comparison: Comparison) -> str:
    runs = len(comparison.runs)
    noun = "norm" if comparison.study is None else "variant"
    parts = [
        counted(len(comparison.names), noun),
        counted(len({run.seed for run in comparison.runs}), "seed"),
        counted(runs, "run"),
    ]
    text = ", ".join(parts)
    if comparison.function is None:
        text += f". The same model, data and initial weights for every {noun} of a seed."
    elif comparison.tuning is None:
        text += ". The same function with the same settings for every norm and seed."
    else:
        text += ". The same function, with the settings that each norm was tuned to."
    if comparison.tuning is not None:
        text += f" {tuning_sentence(comparison.tuning)}"
    unfinished = sum(not run.is_as_expected for run in comparison.runs)
    if unfinished:
        text += f" {unfinished} of {runs} runs did not finish; they are marked."
    return text


def _subject(comparison: Comparison) -> str:
    return "Norms compared" if comparison.study is None else printable(comparison.study["title"])


def _more_metrics(comparison: Comparison, rows: Sequence[SummaryRow]) -> list[Markup]:
    """The metrics that the table has no room for, a line each."""
    names = comparison.other_metrics[MAX_METRICS:]
    if comparison.has_known_measure or not names:
        return []
    shown = names[:MAX_LINES]
    more = "" if len(names) == len(shown) else f", the first {MAX_LINES} of {len(names)}"
    headings = ["metric", *(row.label for row in rows)]
    columns = [own_metric(comparison, name) for name in shown]
    lines = [
        [column.heading, *(column.of_norm(row) for row in rows)]
        for column in columns
        if column.of_norm
    ]
    caption = f"Mean ± sample standard deviation over seeds{more}."
    table = Table(headings, [False, *(True for _ in rows)], lines)
    contents = [table.html("More metrics", caption)]
    return [part("folded", counted(len(names), "more metric"), contents)]


def _more_curves(comparison: Comparison) -> list[Markup]:
    """What else an own function logged, by name."""
    if comparison.function is None:
        return []
    names = figures.own_columns(comparison)[figures.MAX_CURVES :]
    if not names:
        return []
    shown = ", ".join(map(own_heading, names[:MAX_LINES]))
    text = f"{counted(len(names), 'more column')} in {METRICS_FILE}: {shown}"
    return [part("paragraph", text + "…" * (len(names) > MAX_LINES), kind="soft")]


def _tid_contents(comparison: Comparison) -> list[Markup]:
    contents = []
    lines = figures.tid_over_time(comparison)
    if lines:
        contents.append(part("gallery", lines))
    maps = figures.tid_heat_maps(comparison)
    if maps:
        first_seed = {run.name: run.seed for run, _ in reversed(maps)}
        shown = [drawn for run, drawn in maps if run.seed == first_seed[run.name]]
        others = [drawn for run, drawn in maps if run.seed != first_seed[run.name]]
        contents += [
            part("heading", "By layer"),
            part(
                "paragraph",
                "Light is a large discrepancy, gray is no number; all maps share one scale.",
                kind="soft",
            ),
            part("gallery", shown)
            if len(shown) <= MAX_MAPS
            else part("folded", f"The maps of {len(shown)} runs", [part("gallery", shown)]),
        ]
        if others:
            contents.append(part("folded", "Other seeds", [part("gallery", others)]))
        left_out = len(figures.mapped_runs(comparison)) - len(maps)
        if left_out:
            contents.append(
                part(
                    "paragraph",
                    f"{counted(left_out, 'more run')} without a map here: `powernorm report` draws "
                    "it on the page of a run alone.",
                    kind="soft",
                )
            )
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
    if comparison.changes is not None:
        title += f". Marked: not as in the preset {comparison.changes['preset']}"
    parts = [settings_table(rest, title, preset_values(comparison.changes))]
    if comparison.function is not None:
        parts.insert(0, settings_table(comparison.function, "Training function"))
    if environment:
        parts += [
            part("heading", "Environment"),
            settings_table(environment, "Versions and machine"),
        ]
    return parts
