"""What papers print beside what was measured here."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Final

from markupsafe import Markup

from powernorm.lab.report import numerals
from powernorm.lab.report.changes import difference_note
from powernorm.lab.report.measures import MEASURES, heading_of
from powernorm.lab.report.numerals import printable
from powernorm.lab.report.records import Comparison, ReportedRun
from powernorm.lab.report.statistics import spread_of
from powernorm.lab.report.statistics_tables import tid_lines
from powernorm.lab.report.tables import Table, copies
from powernorm.runs import PaperRecord

HEADINGS: Final = ("norm", "placement", "paper", "measured", "measure", "paper's data")

NOT_RUN: Final = "not run"

CAPTION: Final = (
    "What the papers print, with the table it is from, and what was measured here: mean ± sample "
    "standard deviation over the seeds that finished."
)


@dataclass(frozen=True, slots=True)
class _Key:
    """What a row is about; a paper's measures are kept apart."""

    norm: str
    placement: str
    dataset: str
    metric: str


def paper_table(comparison: Comparison) -> Table:
    """The papers' numbers in their order, beside what was measured, then the TID of the norms."""
    is_number = [heading == "measured" for heading in HEADINGS]
    return Table(HEADINGS, is_number, [*_lines(comparison), *tid_lines(comparison)], wide="paper")


def _lines(comparison: Comparison) -> Iterator[list[str]]:
    rows: dict[_Key, list[PaperRecord]] = {}
    for record in comparison.paper:
        key = _Key(record["norm"], record["placement"], record["dataset"], record["metric"])
        rows.setdefault(key, []).append(record)
    for key, records in rows.items():
        yield [
            printable(key.norm),
            key.placement,
            "; ".join(printed_with_source(record, comparison.paper) for record in records),
            _measured(comparison.runs, key),
            printable(heading_of(key.metric)),
            printable(key.dataset),
        ]


def printed_with_source(record: PaperRecord, beside: Iterable[PaperRecord]) -> str:
    """A paper's number and where it stands, as `_printed_value`."""
    return f"{_printed_value(record, beside)} ({printable(record['source'])})"


def _printed_value(record: PaperRecord, beside: Iterable[PaperRecord] = ()) -> str:
    """A paper's number with the paper's decimals; a score of 0 is no score.

    Args:
        record: the number.
        beside: among others the rest of its column, of which the longest says how many decimals
            the paper prints.
    """
    value = record["value"]
    if value is None:
        return "diverged"
    if isinf(value):
        return "∞"
    is_score = record["metric"] in MEASURES and MEASURES[record["metric"]].higher_is_better
    if is_score and value == 0:
        return "0, failed"
    column = [one["value"] for one in (record, *beside) if _column(one) == _column(record)]
    return f"{value:.{max(map(_decimals, column))}f}"


def _column(record: PaperRecord) -> tuple[str, str, str]:
    """What is printed with the same number of decimals."""
    return record["source"].partition(",")[0], record["dataset"], record["metric"]


def _decimals(value: float | None) -> int:
    """Of a number as it was typed, at least one.

    >>> _decimals(77.21), _decimals(35.0), _decimals(None)
    (2, 1, 1)
    """
    return 1 if value is None or isinf(value) else max(1, len(repr(value).partition(".")[2]))


def _measured(runs: Sequence[ReportedRun], key: _Key) -> str:
    ours = [run for run in runs if (run.name, run.placement) == (key.norm, key.placement)]
    if not ours:
        return NOT_RUN
    value = spread_of(ours, key.metric)
    if value is None:
        broken = {run.shown_status: (run.seed,) for run in ours if not run.finished}
        return numerals.mark(broken)
    lost = len(ours) - sum(run.finished for run in ours)
    seeds = f"{value.count} of {len(ours)}" if lost else str(value.count)
    return f"{numerals.spread(value)} ({seeds} {'seed' if len(ours) == 1 else 'seeds'})"


def paper_contents(comparison: Comparison) -> list[Markup]:
    """The section's contents; empty for a recipe beside which no paper stands."""
    if not comparison.paper:
        return []
    table = paper_table(comparison)
    return [*difference_note(comparison), table.html("Paper and measured", CAPTION), copies(table)]
