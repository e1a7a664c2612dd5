"""The tables of the page: each scrolls in its own box, so that the page never does."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from powernorm.report import tables
from powernorm.report.markup import Markup, element
from powernorm.report.records import Comparison
from powernorm.report.summary import SummaryRow, best_rows


def _scrolling(label: str, table: Markup) -> Markup:
    """A wide table scrolls in its own box, which the keyboard reaches, too."""
    return element(
        "div",
        table,
        attributes={"class": "scroll", "role": "region", "aria-label": label, "tabindex": "0"},
    )


def _caption(text: str) -> Markup:
    return element("caption", element("span", text))


def summary_table(rows: Sequence[SummaryRow]) -> Markup:
    """The table of the comparison, best norm shaded, runs that did not finish in alarm colour."""
    best = best_rows(rows)
    headings = [
        element(
            "th", column.heading, attributes=_cell_attributes(numeric=column.numeric, scope="col")
        )
        for column in tables.COLUMNS
    ]
    lines = []
    for row in rows:
        names = ["baseline"] * row.is_baseline + ["best"] * (row.label in best)
        lines.append(element("tr", *_summary_cells(row), attributes={"class": " ".join(names)}))
    note = "Perplexity per word, lower is better; the best norm is shaded."
    if not all(row.complete for row in rows):
        note += " " + tables.FOOTNOTE
    table = element(
        "table",
        _caption(note),
        element("thead", element("tr", *headings)),
        element("tbody", *lines),
    )
    return _scrolling("Results", table)


def _summary_cells(row: SummaryRow) -> Iterator[Markup]:
    for column, text in zip(tables.COLUMNS, tables.cells(row), strict=True):
        if column.key == "norm":
            yield element("th", text, attributes={"scope": "row"})
            continue
        alarm = not row.complete and column.key in {"valid", "test", "status"}
        yield element(
            "td",
            text,
            attributes=_cell_attributes(
                numeric=column.numeric, alarm=alarm, wrap=column.key == "status" and alarm
            ),
        )


def _cell_attributes(
    *, numeric: bool, alarm: bool = False, wrap: bool = False, scope: str = ""
) -> dict[str, str]:
    names = ["number"] * numeric + ["alarm"] * alarm + ["wrap"] * wrap
    attributes = {"class": " ".join(names)} if names else {}
    return attributes | ({"scope": scope} if scope else {})


def markdown_block(rows: Sequence[SummaryRow]) -> Markup:
    """The same table as Markdown in a block that one click selects."""
    return element(
        "details",
        element("summary", "The table as Markdown, to copy"),
        element("pre", tables.markdown_table(rows), attributes={"tabindex": "0"}),
    )


def run_table(comparison: Comparison) -> Markup:
    """One row a run with its status and its message."""
    numeric = {"seed", "valid perplexity", "test perplexity", "tokens/s", "non-finite batches"}
    headings = [
        element("th", name, attributes=_cell_attributes(numeric=name in numeric, scope="col"))
        for name in tables.RUN_HEADINGS
    ]
    lines = []
    for run in comparison.runs:
        first, *others = zip(tables.RUN_HEADINGS, tables.run_cells(run), strict=True)
        lines.append(
            element(
                "tr",
                element("th", first[1], attributes={"scope": "row"}),
                *(
                    element(
                        "td",
                        text,
                        attributes=_cell_attributes(
                            numeric=name in numeric,
                            alarm=name == "status" and not run.finished,
                            wrap=name == "note" and len(text) > 20,
                        ),
                    )
                    for name, text in others
                ),
            )
        )
    table = element(
        "table",
        _caption("One row a run, nothing averaged."),
        element("thead", element("tr", *headings)),
        element("tbody", *lines),
    )
    return _scrolling("Every run", table)


def glossary() -> Markup:
    """What each column of the table means."""
    pairs = (
        (element("dt", column.heading), element("dd", column.meaning)) for column in tables.COLUMNS
    )
    return element("dl", *(part for pair in pairs for part in pair))


def settings_table(settings: Mapping[str, Any], caption: str) -> Markup:
    """Nested settings, one row a value under its dotted name."""
    lines = [
        element(
            "tr",
            element("th", name, attributes={"scope": "row"}),
            element("td", text, attributes=_cell_attributes(numeric=False, wrap=True)),
        )
        for name, text in _flat(settings)
    ]
    return _scrolling(caption, element("table", _caption(caption), element("tbody", *lines)))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts, the form that `--set` takes."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
            yield f"{prefix}{key}", ", ".join(map(str, value))
        else:
            yield f"{prefix}{key}", str(value)
