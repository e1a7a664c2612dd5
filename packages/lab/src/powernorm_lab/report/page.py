"""Pages of comparisons: contents, selection of folders, and paths of the files."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from markupsafe import Markup

from powernorm.errors import InputError
from powernorm.files import read_text
from powernorm_lab.report import figures
from powernorm_lab.report.columns import MAX_METRICS, own_metric
from powernorm_lab.report.comparison_tables import (
    changes_table,
    difference_note,
    glossary,
    headline,
    preset_values,
    run_table,
    scoring_notes,
    settings_table,
    summary_table,
    table_of,
)
from powernorm_lab.report.conclusion import conclusion, race_contents
from powernorm_lab.report.diagnosis_page import comparison_contents
from powernorm_lab.report.document import Article, SectionParts, document, gallery, part, write_page
from powernorm_lab.report.loading import read_comparison, read_runs
from powernorm_lab.report.measures import own_heading
from powernorm_lab.report.numerals import counted, printable
from powernorm_lab.report.overlays import lines_of, training_contents
from powernorm_lab.report.paper_tables import paper_contents, paper_table, score_contents
from powernorm_lab.report.records import Comparison, ReportedRun, Translation
from powernorm_lab.report.seed_statistics import seed_contents, seed_table
from powernorm_lab.report.studies import study_contents
from powernorm_lab.report.summary import SummaryRow, summarize
from powernorm_lab.report.tables import Table, copies
from powernorm_lab.report.tuning import tuning_contents, tuning_sentence
from powernorm_lab.runs import (
    COMPARISON_FILE,
    METRICS_FILE,
    REPORT_FILE,
    RESULTS_FILE,
    TRANSLATIONS_COLUMNS,
    TRANSLATIONS_FILE,
    is_run_folder,
)

MAX_MAPS: Final = 8
"""Largest number of visible heat maps; more are collapsed."""
MAX_LINES: Final = 100
"""Largest number of metrics or columns that are listed beyond those in tables and figures."""


def write_report(folder: Path) -> Path:
    """Write `report.html` into a comparison folder from the files there.

    Results may be partial: failed runs and runs in progress are marked.

    Returns:
        The path of the report.

    Raises:
        InputError: `folder` is not a comparison, or a file in it is damaged.
    """
    return write_page(render_page(read_comparison(folder)), folder / REPORT_FILE)


def render_page(comparison: Comparison) -> str:
    """Return the page of a comparison as HTML."""
    return document(headline(comparison), [_article(comparison)])


def render_pages(comparisons: Sequence[Comparison]) -> str:
    """Return a page of several comparisons, each with its own anchor, as HTML."""
    title = f"{len(comparisons)} comparisons"
    return document(title, [_article(comparison) for comparison in comparisons])


def tables_of(comparison: Comparison) -> dict[str, Table]:
    """Return the non-empty tables of a comparison by name."""
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
        sections=_sections(comparison),
        anchor=comparison.anchor,
        conclusion=conclusion(comparison),
    )


def _place(comparison: Comparison) -> str:
    """Return the folder of a comparison, if a page has several."""
    if not comparison.anchor:
        return ""
    return f" ({printable('/'.join(comparison.folder.resolve().parts[-2:]))})"


def _sections(comparison: Comparison) -> list[SectionParts]:
    rows = summarize(comparison)
    results = table_of(comparison, rows)
    paper = paper_contents(comparison)
    result_contents = [
        *([] if paper else difference_note(comparison)),
        summary_table(comparison, rows),
        *_more_metrics(comparison, rows),
        *scoring_notes(comparison),
        copies(results),
    ]
    curves = [*gallery(figures.learning_curves(comparison)), *_more_curves(comparison)]
    gradients = gallery(figures.gradients_over_time(comparison))
    diagnosed = training_contents(lines_of(comparison.runs), f"{comparison.anchor}diagnosed-")
    every_run = run_table(comparison).html("Every run", "One row per run, without averages.")
    data = settings_table(comparison.data, "Corpus of the comparison")
    return [
        ("study", "The study", study_contents(comparison)),
        ("results", "Results", result_contents),
        ("tuning", "How the settings were chosen", tuning_contents(comparison)),
        ("race", "The race", race_contents(comparison)),
        ("seeds", "What the seeds say", seed_contents(comparison, rows)),
        ("paper", "Paper and measured", paper),
        ("curves", "Learning curves", curves),
        ("tid", "Training inference discrepancy", _tid_contents(comparison)),
        ("gradients", "Gradients of the norms' inputs", gradients),
        ("diagnosed", "Diagnoses through training", diagnosed),
        ("statistics", "Scores by kind of statistics", score_contents(comparison)),
        ("diagnoses", "Diagnoses", comparison_contents(comparison)),
        ("translations", "Translations", sample_contents(comparison)),
        ("runs", "Every run", [every_run]),
        ("columns", "What the columns mean", [glossary(results)]),
        ("data", "Data", [data] if comparison.data else []),
        ("settings", "Settings and environment", _settings(comparison)),
    ]


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
    """Return the metrics that do not fit into the table, one per line."""
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
    """Return the names of further columns that a user's function logged."""
    if comparison.function is None:
        return []
    names = figures.own_columns(comparison)[figures.MAX_CURVES :]
    if not names:
        return []
    shown = ", ".join(map(own_heading, names[:MAX_LINES]))
    text = f"{counted(len(names), 'more column')} in {METRICS_FILE}: {shown}"
    return [part("paragraph", text + "…" * (len(names) > MAX_LINES), kind="soft")]


def _tid_contents(comparison: Comparison) -> list[Markup]:
    contents = gallery(figures.tid_over_time(comparison))
    maps = figures.tid_heat_maps(comparison)
    if maps:
        first_seed = {run.name: run.seed for run, _ in reversed(maps)}
        shown = [drawn for run, drawn in maps if run.seed == first_seed[run.name]]
        others = [drawn for run, drawn in maps if run.seed != first_seed[run.name]]
        contents += [
            part("heading", "By layer"),
            part(
                "paragraph",
                "Light colors are large discrepancies, gray is a missing number; all maps share "
                "one scale.",
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
                    f"{counted(left_out, 'more run')} without a map here: `powernorm report` with "
                    "one run alone draws it.",
                    kind="soft",
                )
            )
    return contents


def _settings(comparison: Comparison) -> list[Markup]:
    """Return tables of the settings and of the environment."""
    settings = comparison.settings
    if not settings and not comparison.function:
        return []
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


# A sample of translations.


NUM_SENTENCES: Final = 10


def read_translations(path: Path) -> list[Translation]:
    """Read a `translations.tsv`, with or without a header.

    Raises:
        InputError: the file cannot be read, or a line does not have three columns.
    """
    text = read_text(path)
    # A last line without a line end is still being written, or its writer was killed.
    complete = text[: text.rfind("\n") + 1]
    found = []
    for number, line in enumerate(complete.split("\n")[:-1], start=1):
        cells = line.removesuffix("\r").split("\t")
        if number == 1 and tuple(cells) == TRANSLATIONS_COLUMNS:
            continue
        if len(cells) != len(TRANSLATIONS_COLUMNS):
            raise InputError(
                f"{path}, line {number}: {len(cells)} columns, expected "
                f"{', '.join(TRANSLATIONS_COLUMNS)} with "
                "tabs between; repair or remove the line"
            )
        source, reference, translation = cells
        found.append((source, reference, translation))
    return found


def sample_contents(comparison: Comparison) -> list[Markup]:
    """Return ten evenly spaced sentences of the test text; empty without translations."""
    by_norm = {
        name: found
        for name, (first, *_) in figures.runs_by_name(comparison.runs).items()
        if (found := _translations_of(comparison, first))
    }
    if not by_norm:
        return []
    first = next(iter(by_norm.values()))
    number = min(NUM_SENTENCES, len(first))
    answers = {
        name: {(source, reference): text for source, reference, text in found}
        for name, found in by_norm.items()
    }
    listed = []
    for index in range(number):
        source, reference, _ = first[index * len(first) // number]
        said = {name: found.get((source, reference)) for name, found in answers.items()}
        lines = {"source": source, "reference": reference}
        listed.append(
            [*lines.items(), *((n, text) for n, text in said.items() if text is not None)]
        )
    summary = f"{number} sentences of the test text, by the first run of each norm"
    return [part("folded", summary, [part("sentences", listed)])]


def _translations_of(comparison: Comparison, run: ReportedRun) -> list[Translation]:
    path = comparison.folder / run.folder / TRANSLATIONS_FILE
    return read_translations(path) if path.exists() else []


# Several folders.


def write_reports(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one page about all comparisons and runs in the folders.

    Runs in the same folder share a table; each comparison has its own.

    Args:
        folders: comparisons and runs, complete or not.
        out: path of the HTML file; by default `report.html` in the only folder, or in the folder
            that contains all of them, or in the current one if that is a comparison itself.

    Returns:
        The path of the page.

    Raises:
        InputError: a folder is neither a comparison nor a run, a file in it is damaged or from a
            newer version, or the page cannot be written.
    """
    target = _target(folders, out)
    comparisons = read_selection(folders)
    if len(comparisons) == 1:
        return write_page(render_page(comparisons[0]), target)
    marked = [
        replace(comparison, anchor=f"part-{number}-")
        for number, comparison in enumerate(comparisons, start=1)
    ]
    return write_page(render_pages(marked), target)


def write_tables(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write the tables of all comparisons and runs in the folders as Markdown, LaTeX and CSV.

    Args:
        folders: comparisons and runs, complete or not.
        out: folder of the files, created if necessary. The names of files begin with the
            comparison's number if there are several.

    Returns:
        The paths of the files.

    Raises:
        InputError: a folder is neither a comparison nor a run, or a file cannot be written.
    """
    comparisons = read_selection(folders)
    found = {
        f"{number}-{name}" if len(comparisons) > 1 else name: table
        for number, comparison in enumerate(comparisons, start=1)
        for name, table in tables_of(comparison).items()
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--tables {out}: the folder cannot be created: give another") from error
    return [
        write_page(text, out / f"{name}.{ending}")
        for name, table in found.items()
        for ending, text in (
            ("md", table.markdown()),
            ("tex", table.latex()),
            ("csv", table.csv()),
        )
    ]


def read_selection(folders: Sequence[Path]) -> list[Comparison]:
    """Read comparisons and runs; runs are grouped by their parent folder.

    Raises:
        InputError: no folder is given, or one is neither a comparison nor a run, or is damaged.
    """
    if not folders:
        raise InputError("no folder is given; expected comparisons or runs of `powernorm compare`")
    groups: dict[Path, list[str] | None] = {}
    for folder in folders:
        place = folder.resolve()
        if not is_run_folder(place) or _is_comparison(place):
            groups[folder if len(folders) == 1 else place] = None
            continue
        names = groups.setdefault(place.parent, [])
        # A comparison that is shown as a whole already contains its runs.
        if names is not None and place.name not in names:
            names.append(place.name)
    return [
        read_comparison(folder) if names is None else read_runs(folder, names)
        for folder, names in groups.items()
    ]


def _is_comparison(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RESULTS_FILE, COMPARISON_FILE))


def _target(folders: Sequence[Path], out: Path | None) -> Path:
    if out is not None:
        if out.is_dir():
            raise InputError(f"{out} is a folder; give --out a file, {out / REPORT_FILE}")
        if not out.absolute().parent.is_dir():
            raise InputError(f"--out {out}: the folder {out.parent} does not exist; make it first")
        return out
    if len(folders) == 1:
        return folders[0] / REPORT_FILE
    shared = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    here = Path.cwd()
    for place in (shared, here):
        # The page of some runs must not replace that of a comparison.
        if place != Path(place.anchor) and not _is_comparison(place):
            return (place.relative_to(here) if place.is_relative_to(here) else place) / REPORT_FILE
    raise InputError(f"{here} is a comparison with its own report; name the file by --out")
