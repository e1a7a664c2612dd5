"""The tables of the page: each scrolls in its own box, so that the page never does."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from powernorm.lab.report import tables
from powernorm.lab.report.columns import (
    Column,
    caption_of_results,
    columns_of,
)
from powernorm.lab.report.markup import Markup, element, join
from powernorm.lab.report.records import Comparison, Run
from powernorm.lab.report.run_columns import RunColumn, run_columns_of
from powernorm.lab.report.summary import SummaryRow, best_rows

_LONG_NAME: Final = 16


def scrolling(label: str, table: Markup) -> Markup:
    """A wide table scrolls in its own box, which the keyboard reaches, too."""
    return element(
        "div",
        table,
        attributes={"class": "scroll", "role": "region", "aria-label": label, "tabindex": "0"},
    )


def caption_of(text: str) -> Markup:
    """A caption that stays in sight while its table scrolls."""
    return element("caption", element("span", text))


def summary_table(comparison: Comparison, rows: Sequence[SummaryRow]) -> Markup:
    """The table of a comparison, best norm shaded, runs that did not finish in alarm colour.

    Args:
        comparison: what was compared.
        rows: of `summarize`.
    """
    best = best_rows(rows, comparison.measure)
    columns = columns_of(comparison)
    headings = [
        element(
            "th", column.heading, attributes=cell_attributes(numeric=column.numeric, scope="col")
        )
        for column in columns
    ]
    lines = []
    for row in rows:
        names = ["baseline"] * row.is_baseline + ["best"] * (row.label in best)
        lines.append(
            element("tr", *_summary_cells(row, columns), attributes={"class": " ".join(names)})
        )
    note = caption_of_results(comparison, is_shaded=bool(best))
    if tables.any_partial(rows):
        note += " " + tables.FOOTNOTE
    table = element(
        "table",
        caption_of(note),
        element("thead", element("tr", *headings)),
        element("tbody", *lines),
    )
    return scrolling("Results", table)


def _summary_cells(row: SummaryRow, columns: Sequence[Column]) -> Iterator[Markup]:
    for column, text in zip(columns, tables.cells(row, columns), strict=True):
        if column.key == "norm":
            yield _row_heading(text)
            continue
        alarm = not row.complete and column.counts_finished
        yield element(
            "td",
            text,
            attributes=cell_attributes(
                numeric=column.numeric, alarm=alarm, wrap=column.key == "status" and alarm
            ),
        )


def cell_attributes(
    *, numeric: bool, alarm: bool = False, wrap: bool = False, wide: bool = False, scope: str = ""
) -> dict[str, str]:
    """Classes of a cell; `scope` for a heading."""
    names = ["number"] * numeric + ["alarm"] * alarm + ["wrap"] * (wrap or wide) + ["wide"] * wide
    attributes = {"class": " ".join(names)} if names else {}
    return attributes | ({"scope": scope} if scope else {})


def copy_blocks(markdown: str, latex: str) -> Markup:
    """The same table as Markdown and as LaTeX, in blocks that one click selects."""
    return join(
        element(
            "details",
            element("summary", f"The table as {name}, to copy"),
            element("pre", text, attributes={"tabindex": "0"}),
        )
        for name, text in (("Markdown", markdown), ("LaTeX", latex))
    )


def run_table(comparison: Comparison) -> Markup:
    """One row a run with its status and its message."""
    columns = run_columns_of(comparison)
    headings = [
        element(
            "th", column.heading, attributes=cell_attributes(numeric=column.numeric, scope="col")
        )
        for column in columns
    ]
    lines = []
    for run in comparison.runs:
        first, *others = tables.run_cells(run, columns)
        lines.append(
            element(
                "tr",
                _row_heading(first),
                *(
                    element("td", text, attributes=_run_attributes(column, text, run))
                    for column, text in zip(columns[1:], others, strict=True)
                ),
            )
        )
    table = element(
        "table",
        caption_of("One row a run, nothing averaged."),
        element("thead", element("tr", *headings)),
        element("tbody", *lines),
    )
    return scrolling("Every run", table)


def _run_attributes(column: RunColumn, text: str, run: Run) -> dict[str, str]:
    return cell_attributes(
        numeric=column.numeric,
        alarm=column.heading == "status" and not run.finished,
        wide=column.heading == "note" and len(text) > 20,
    )


def _row_heading(text: str) -> Markup:
    """A first cell; a long dotted name may break at its dots on a phone."""
    if len(text) <= _LONG_NAME:
        return element("th", text, attributes={"scope": "row"})
    parts = join(text.split("."), between=join([".", element("wbr")]))
    return element("th", parts, attributes={"scope": "row", "class": "long"})


def plain_table(
    label: str,
    caption: str,
    headings: Sequence[tuple[str, bool]],
    lines: Sequence[Sequence[str]],
    *,
    wrapped: str = "",
) -> Markup:
    """A table of texts that scrolls in its own box.

    Args:
        label: for readers who cannot see the box.
        caption: what the table shows.
        headings: each with whether its column is of numbers.
        lines: the texts.
        wrapped: heading of a column of long texts.
    """
    head = [
        element("th", text, attributes=cell_attributes(numeric=numeric, scope="col"))
        for text, numeric in headings
    ]
    body = []
    for first, *others in lines:
        cells = [
            element(
                "td",
                text,
                attributes=cell_attributes(
                    numeric=numeric, wide=name == wrapped and len(text) > 20
                ),
            )
            for (name, numeric), text in zip(headings[1:], others, strict=True)
        ]
        body.append(element("tr", _row_heading(first), *cells))
    table = element(
        "table",
        caption_of(caption),
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    return scrolling(label, table)


def glossary(comparison: Comparison) -> Markup:
    """What each column of the table means."""
    pairs = (
        (element("dt", column.heading), element("dd", column.meaning))
        for column in columns_of(comparison)
    )
    return element("dl", *(part for pair in pairs for part in pair))


def settings_table(
    settings: Mapping[str, Any], caption: str, preset: Mapping[str, str] = MappingProxyType({})
) -> Markup:
    """Nested settings, one row a value under its dotted name.

    Args:
        settings: the values.
        caption: what they are of.
        preset: values of the preset where it has others; their rows are marked.
    """
    lines = []
    for name, text in _flat(settings):
        shown = f"{text} (preset: {preset[name]})" if name in preset else text
        lines.append(
            element(
                "tr",
                element("th", name, attributes={"scope": "row"}),
                element("td", shown, attributes=cell_attributes(numeric=False, wrap=True)),
                attributes={"class": "changed"} if name in preset else {},
            )
        )
    return scrolling(caption, element("table", caption_of(caption), element("tbody", *lines)))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts, the form that `--set` takes."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
            yield f"{prefix}{key}", ", ".join(map(str, value))
        else:
            yield f"{prefix}{key}", str(value)
