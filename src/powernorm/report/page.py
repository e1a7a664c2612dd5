"""The report: one HTML file that loads nothing and reads well on a desktop and on a phone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from powernorm.report import figures, tables
from powernorm.report.figures import DrawnFigure
from powernorm.report.html_tables import (
    glossary,
    markdown_block,
    run_table,
    settings_table,
    summary_table,
)
from powernorm.report.loading import read_comparison
from powernorm.report.markup import Markup, element
from powernorm.report.records import Comparison
from powernorm.report.style import STYLE
from powernorm.report.summary import summarize
from powernorm.runs import REPORT_FILE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a comparison folder from the files that lie there.

    Works with partial results: runs that failed or still go on are shown as such.

    Returns:
        The path of the report.

    Raises:
        InputError: `folder` is no comparison, or a file in it is damaged.
    """
    page = render_page(read_comparison(folder))
    target = folder / REPORT_FILE
    # A reader never sees half a page, also when the writer is killed.
    draft = target.with_suffix(".html.partial")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def render_page(comparison: Comparison) -> str:
    """The whole page."""
    title = tables.headline(comparison)
    sections = list(_sections(comparison))
    head = element(
        "head",
        element("meta", attributes={"charset": "utf-8"}),
        element("meta", attributes={"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        element(
            "meta",
            attributes={"name": "viewport", "content": "width=device-width, initial-scale=1"},
        ),
        element("title", f"powernorm: {title}"),
        element("style", Markup(STYLE)),
    )
    body = element(
        "body",
        element(
            "header",
            element("h1", f"Norms compared: {title}"),
            element("p", _lead(comparison), attributes={"class": "lead"}),
        ),
        _contents(sections),
        element("main", *(_section(*section) for section in sections)),
    )
    return "<!doctype html>\n" + element("html", head, body, attributes={"lang": "en"}) + "\n"


_SectionParts = tuple[str, str, Sequence[Markup]]
"""Id, heading and contents."""


def _sections(comparison: Comparison) -> Iterator[_SectionParts]:
    rows = summarize(comparison)
    yield "results", "Results", [summary_table(rows), markdown_block(rows)]
    curves = figures.learning_curves(comparison)
    if curves:
        yield "curves", "Learning curves", [_gallery(curves)]
    tid = _tid_contents(comparison)
    if tid:
        yield "tid", "Training inference discrepancy", tid
    yield "runs", "Every run", [run_table(comparison)]
    yield "columns", "What the columns mean", [glossary()]
    if comparison.data:
        yield "data", "Data", [settings_table(comparison.data, "Corpus of the comparison")]
    if comparison.settings:
        yield "settings", "Settings and environment", _settings(comparison.settings)


def _lead(comparison: Comparison) -> str:
    runs = len(comparison.runs)
    parts = [
        _counted(len(comparison.norms), "norm"),
        _counted(len({run.seed for run in comparison.runs}), "seed"),
        _counted(runs, "run"),
    ]
    text = ", ".join(parts)
    text += ". The same model, data and initial weights for every norm of a seed."
    unfinished = sum(not run.finished for run in comparison.runs)
    if unfinished:
        text += f" {unfinished} of {runs} runs did not finish; they are marked."
    return text


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _contents(sections: Sequence[_SectionParts]) -> Markup:
    links = [
        element("li", element("a", heading, attributes={"href": f"#{name}"}))
        for name, heading, _ in sections
    ]
    return element("nav", element("ul", *links), attributes={"aria-label": "Contents"})


def _section(name: str, heading: str, contents: Sequence[Markup]) -> Markup:
    return element("section", element("h2", heading), *contents, attributes={"id": name})


def _gallery(drawn: Sequence[DrawnFigure]) -> Markup:
    return element("div", *map(_figure, drawn), attributes={"class": "figures"})


def _figure(drawn: DrawnFigure) -> Markup:
    return element("figure", drawn.svg, element("figcaption", drawn.caption))


def _tid_contents(comparison: Comparison) -> list[Markup]:
    contents = []
    lines = figures.tid_over_time(comparison)
    if lines:
        contents.append(_gallery(lines))
    maps = figures.tid_heat_maps(comparison)
    if maps:
        first_seed = {run.norm: run.seed for run, _ in reversed(maps)}
        shown = [drawn for run, drawn in maps if run.seed == first_seed[run.norm]]
        others = [drawn for run, drawn in maps if run.seed != first_seed[run.norm]]
        contents += [
            element("h3", "By layer"),
            element(
                "p",
                "Light is a large discrepancy, grey is no number; all maps share one scale.",
                attributes={"class": "soft"},
            ),
            _gallery(shown),
        ]
        if others:
            contents.append(
                element("details", element("summary", "The other seeds"), _gallery(others))
            )
    return contents


def _settings(settings: Mapping[str, Any]) -> list[Markup]:
    """Versions and machine apart from the configuration of the experiment."""
    environment = {
        key: settings[key] for key in ("versions", "machine") if settings.get(key) is not None
    }
    rest = {key: value for key, value in settings.items() if key not in environment}
    parts = [settings_table(rest, "Configuration of the comparison")]
    if environment:
        parts += [
            element("h3", "Environment"),
            settings_table(environment, "Versions and machine"),
        ]
    return parts
