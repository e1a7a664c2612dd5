"""Pages of comparisons and diagnoses, and the files that they are written to."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.records import SMALLEST_GAP, DiagnosisRecord, EvaluationRow, swap_call
from powernorm_lab.report import (
    comparison_tables,
    diagnoses,
    figures,
    numerals,
    overlays,
    paper_tables,
    statistics,
    studies,
    tuning,
)
from powernorm_lab.report.comparison_tables import (
    TID_MEANING,
    changes_table,
    headline,
    norm_table,
    run_table,
)
from powernorm_lab.report.conclusion import conclusion, race_table, seed_table
from powernorm_lab.report.document import (
    Article,
    article,
    document,
    rendered,
    sections,
    write_page,
)
from powernorm_lab.report.loading import (
    is_comparison,
    read_diagnosis,
    read_selection,
    read_translations,
)
from powernorm_lab.report.measures import heading_of
from powernorm_lab.report.overlays import OverlayLine, lines_of
from powernorm_lab.report.paper_tables import paper_table
from powernorm_lab.report.records import Comparison
from powernorm_lab.report.statistics import summarize
from powernorm_lab.report.tables import Table
from powernorm_lab.runs import REPORT_FILE

MAX_MAPS: Final = 8
"""Largest number of visible heat maps; more are collapsed."""
MAX_LISTED: Final = 100
"""Largest number of metrics or columns that are listed beyond those in tables and figures."""
MAX_DRAWN: Final = 12
"""Largest number of runs whose diagnoses have figures on a comparison's page, about ten each."""
NUM_SENTENCES: Final = 10


# Comparisons.


def render_page(comparison: Comparison) -> str:
    """Return the page of a comparison as HTML."""
    return document(headline(comparison), [comparison_article(comparison)])


def comparison_article(comparison: Comparison) -> Article:
    """Return the contents of a comparison's page, with its folder if a page has several."""
    anchor, study = comparison.anchor, comparison.study
    place = f" ({'/'.join(comparison.folder.resolve().parts[-2:])})" if anchor else ""
    heading = f"{study['title'] if study else 'Norms compared'}: {headline(comparison)}{place}"
    module = rendered_comparison(comparison)
    return article(module, heading, conclusion=conclusion(comparison), anchor=anchor)


def rendered_comparison(comparison: Comparison) -> Any:
    """Return the template of a comparison's page, whose macros render one section each."""
    settings = comparison.settings
    environment = {
        key: settings[key]
        for key in ("versions", "machine", "date")
        if settings.get(key) is not None
    }
    return rendered(
        "comparison.html",
        c=comparison,
        rows=summarize(comparison),
        configuration={key: settings[key] for key in settings if key not in environment},
        environment=environment,
        overlay=_overlay(lines_of(comparison.runs), f"{comparison.anchor}diagnosed-"),
        diagnosed_runs=lambda: list(_diagnosed_runs(comparison)),
        translated_sentences=lambda: _translated_sentences(comparison),
        figures=figures,
        heading_of=heading_of,
        papers=paper_tables,
        race_table=race_table,
        seed_table=seed_table,
        stats=statistics,
        studies=studies,
        tables=comparison_tables,
        tuned=tuning,
        MAX_LISTED=MAX_LISTED,
        MAX_MAPS=MAX_MAPS,
    )


def tables_of(comparison: Comparison) -> dict[str, Table]:
    """Return the non-empty tables of a comparison by name."""
    rows, changes = summarize(comparison), comparison.changes
    found = {
        "results": norm_table(comparison, rows),
        "runs": run_table(comparison),
        "seeds": seed_table(comparison, rows),
        "paper": paper_table(comparison) if comparison.paper else None,
        "settings": None if changes is None else changes_table(changes),
    }
    return {name: table for name, table in found.items() if table is not None}


def _diagnosed_runs(comparison: Comparison) -> Iterator[dict[str, object]]:
    """Yield summary, lead and sections of each run with a diagnosis."""
    diagnosed = [
        (index, run, run.diagnosis)
        for index, run in enumerate(comparison.runs)
        if run.diagnosis is not None
    ]
    for number, (index, run, record) in enumerate(diagnosed):
        is_drawn = number < MAX_DRAWN
        prefix = f"{comparison.anchor}diagnosis-{index}-"
        module = _diagnosis(record, prefix, only_tables=not is_drawn)
        yield {
            "summary": f"{run.folder}: {module.verdict_words().unescape()}",
            "lead": module.lead(),
            "sections": sections(module),
            "is_drawn": is_drawn,
        }


def _translated_sentences(comparison: Comparison) -> list[list[tuple[str, str]]]:
    """Return evenly spaced sentences of the test text with the translations of each norm."""
    by_norm = {
        name: found
        for name, (first, *_) in figures.runs_by_name(comparison.runs).items()
        if (found := read_translations(comparison.folder / first.folder))
    }
    if not by_norm:
        return []
    first = next(iter(by_norm.values()))
    number = min(NUM_SENTENCES, len(first))
    answers = {
        name: {(source, reference): text for source, reference, text in found}
        for name, found in by_norm.items()
    }
    chosen = [first[index * len(first) // number][:2] for index in range(number)]
    return [
        [
            ("source", pair[0]),
            ("reference", pair[1]),
            *((name, found[pair]) for name, found in answers.items() if pair in found),
        ]
        for pair in chosen
    ]


# Diagnoses.


def write_diagnosis_page(diagnosis: DiagnosisRecord | Path, target: Path) -> Path:
    """Write the page of a diagnosis.

    Args:
        diagnosis: the record, or the path of its `diagnosis.json`.
        target: path of the HTML file.

    Returns:
        `target`.

    Raises:
        InputError: the file is damaged, or a newer version of powernorm wrote it.
    """
    record = read_diagnosis(diagnosis) if isinstance(diagnosis, Path) else diagnosis
    return write_page(render_diagnosis(record), target)


def render_diagnosis(record: DiagnosisRecord) -> str:
    """Return the page of a diagnosis as HTML."""
    heading = f"Diagnosis: {record['model']}"
    return document(heading, [article(_diagnosis(record), heading)])


def evaluation_words(rows: Sequence[EvaluationRow]) -> str:
    """Return sentences about the gap of running and batch statistics, and re-estimation.

    >>> evaluation_words([
    ...     {"statistics": "running", "tokens": None, "loss": 4.5},
    ...     {"statistics": "re-estimated", "tokens": None, "loss": 4.2},
    ...     {"statistics": "batch", "tokens": 4096, "loss": 4.0},
    ... ])
    'With running statistics the loss is 4.5000, 0.5000 above that with batch statistics of about \
4.1k predictions (4.0000). Re-estimation closes 60 % of the gap.'
    """
    return str(_diagnosis({}).evaluation_words(rows).unescape())


def _diagnosis(record: Any, prefix: str = "", *, only_tables: bool = False) -> Any:
    return rendered(
        "diagnosis.html",
        d=record,
        prefix=prefix,
        only_tables=only_tables,
        count=numerals.count,
        own=diagnoses,
        papers=paper_tables,
        percent=numerals.percent,
        swap_call=swap_call,
        SMALLEST_GAP=SMALLEST_GAP,
        TID_MEANING=TID_MEANING,
    )


def write_overlay_page(lines: Sequence[OverlayLine], target: Path) -> Path:
    """Write the page of several diagnoses and return its path.

    Raises:
        InputError: the file cannot be written.
    """
    return write_page(render_overlay(lines), target)


def render_overlay(lines: Sequence[OverlayLine]) -> str:
    """Return the page of several diagnoses as HTML."""
    heading = f"Diagnoses: {', '.join(line.name for line in lines)}"
    return document(heading, [article(_overlay(lines, ""), heading)])


def _overlay(lines: Sequence[OverlayLine], prefix: str) -> Any:
    return rendered("overlay.html", lines=lines, prefix=prefix, overlays=overlays)


# Several folders.


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write one page about all comparisons and runs in the folders, from the files there.

    Runs in the same folder share a table; each comparison has its own. Results may be partial:
    failed runs and runs in progress are marked.

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
    articles = [
        comparison_article(replace(comparison, anchor=f"part-{number}-"))
        for number, comparison in enumerate(comparisons, start=1)
    ]
    return write_page(document(f"{len(comparisons)} comparisons", articles), target)


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
        if place != Path(place.anchor) and not is_comparison(place):
            return (place.relative_to(here) if place.is_relative_to(here) else place) / REPORT_FILE
    raise InputError(f"{here} is a comparison with its own report; name the file by --out")
