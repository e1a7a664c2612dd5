"""Results of comparisons next to published results, as Markdown."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from powernorm.errors import InputError
from powernorm_lab.report import comparison_tables, numerals, tuning
from powernorm_lab.report.comparison_tables import norm_columns, tid_text
from powernorm_lab.report.conclusion import tested_cells
from powernorm_lab.report.document import rendered
from powernorm_lab.report.loading import read_comparison
from powernorm_lab.report.measures import heading_of, measure_of
from powernorm_lab.report.numerals import NOTHING
from powernorm_lab.report.paper_tables import NOT_RUN, printed_with_source
from powernorm_lab.report.records import Comparison, runs_of
from powernorm_lab.report.statistics import (
    LEAST_SEEDS,
    POWER,
    REFERENCE,
    PairedGap,
    SummaryRow,
    finite,
    paired_gap,
    summarize,
    untested,
)
from powernorm_lab.report.tables import Column, Table
from powernorm_lab.runs import ChangesRecord, PaperRecord

# One comparison in several folders, whose seeds or norms were trained separately.


_DIVIDED: Final = frozenset({"norms", "seeds", "norm_options", "variants", "date"})
"""Settings that may differ: those that are divided among the folders, and the date."""
_BY_NAME: Final = ("norm_options", "variants")
"""Settings in which a name that two folders share must have the same value."""
_SENTENCES: Final = re.compile(r"(?<=\.) (?=[A-Z])")
"""Gap between sentences; a period in a paper's name precedes a lower-case letter or a number."""


def joined(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Join comparisons with the same settings, data, versions and machine except norms and seeds.

    Args:
        comparisons: comparisons in order; a joined one takes the position of its first part.

    Raises:
        InputError: two parts of one comparison have the same run.
    """
    groups: list[list[Comparison]] = []
    for comparison in comparisons:
        for group in groups:
            if all(_belong_together(comparison, other) for other in group):
                group.append(comparison)
                break
        else:
            groups.append([comparison])
    return [_join(group) for group in groups]


def _belong_together(one: Comparison, other: Comparison) -> bool:
    same = _shared(one) == _shared(other)
    return same and all(_agree(one.settings, other.settings, key) for key in _BY_NAME)


def _shared(comparison: Comparison) -> tuple[Any, ...]:
    settings = {key: value for key, value in comparison.settings.items() if key not in _DIVIDED}
    # The path of the function's file may differ between machines; its contents may not.
    function = comparison.function and (comparison.function["name"], comparison.function["sha256"])
    return (
        *(comparison.task, comparison.preset, comparison.placement, comparison.study),
        *(comparison.goal, function, comparison.data, settings, comparison.tuning),
    )


def _agree(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    ours, theirs = one.get(key) or {}, other.get(key) or {}
    same = all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
    return same and bool(ours) == bool(theirs)


def _join(parts: Sequence[Comparison]) -> Comparison:
    first = parts[0]
    if len(parts) == 1:
        return first
    _check_divided(parts)
    merged = {
        key: dict(item for part in parts for item in part.settings[key].items())
        for key in _BY_NAME
        if first.settings.get(key)
    }
    days = sorted({str(part.settings["date"]) for part in parts if part.settings.get("date")})
    dates = {"date": " to ".join(dict.fromkeys((days[0], days[-1])))} if days else {}
    return replace(
        first,
        settings={**first.settings, **merged, **dates},
        runs=[run for part in parts for run in part.runs],
        paper=next((part.paper for part in parts if part.paper), []),
        paper_statistics=next((p.paper_statistics for p in parts if p.paper_statistics), []),
        reduced=_merged_notes([part.reduced for part in parts]),
        changes=_merged_changes([part.changes for part in parts if part.changes is not None]),
        race=next((part.race for part in parts if part.race is not None), None),
        standing=None,
    )


def _merged_notes(notes: Sequence[str]) -> str:
    """Join notes without repeated sentences; some name the norms of their part."""
    return " ".join(dict.fromkeys(part for note in notes for part in _SENTENCES.split(note)))


def _merged_changes(changes: Sequence[ChangesRecord]) -> ChangesRecord | None:
    """Merge changes of the same preset, each of which has the options of its norms."""
    if not changes:
        return None
    settings = {name: change for one in changes for name, change in one["settings"].items()}
    return ChangesRecord(preset=changes[0]["preset"], settings=settings)


def _check_divided(parts: Sequence[Comparison]) -> None:
    held: dict[tuple[str, str | None, int], Comparison] = {}
    for part in parts:
        for run in part.runs:
            holder = held.setdefault((run.name, run.placement, run.seed), part)
            if holder is not part:
                raise InputError(
                    f"{holder.folder} and {part.folder} both have {run.name}, seed {run.seed}, of "
                    "one comparison: give one of the two"
                )


# Claims of papers about two norms, and whether they hold here.


Outcome = Literal["shown", "opposite", "undecided", "no sign", "few seeds", "unmeasured"]

WORDS: Final[dict[Outcome, str]] = {
    "shown": "the same (p alone)",
    "opposite": "the opposite (p alone)",
    "undecided": "not decided by these seeds",
    "no sign": "none: it prints no difference",
    "few seeds": f"fewer than {LEAST_SEEDS} seeds",
    "unmeasured": "not run",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A published difference between two norms, and the measured one.

    Attributes:
        norm: short name, or label of a variant.
        against: norm that the paper compares it with, usually LayerNorm.
        metric: metric of a run.
        source: paper and table.
        printed: published value of the norm minus that of `against`.
        measured: the same difference here, paired by seed; None if one of the two was not run.
    """

    norm: str
    against: str
    metric: str
    source: str
    printed: float
    measured: PairedGap | None

    @property
    def outcome(self) -> Outcome:
        """Whether the measured 95 % interval excludes 0 and has the published sign."""
        if self.measured is None:
            return "unmeasured"
        if self.printed == 0:
            return "no sign"
        if self.measured.count < LEAST_SEEDS:
            return "few seeds"
        if not self.measured.is_clear:
            return "undecided"
        same = (self.measured.difference > 0) == (self.printed > 0)
        return "shown" if same else "opposite"


def claims(comparison: Comparison) -> list[Claim]:
    """Return the published differences for a comparison, in their order."""
    printed = {_key(record, record["norm"]): record["value"] for record in comparison.paper}
    found = []
    for record in comparison.paper:
        norm, metric = record["norm"], record["metric"]
        for against in record.get("against", [REFERENCE]):
            values = finite((record["value"], printed.get(_key(record, against))))
            if norm == against or len(values) < 2:
                continue
            ours, theirs = (
                runs_of(comparison.runs, name, record["placement"]) for name in (norm, against)
            )
            measured = paired_gap(ours, theirs, metric)
            found.append(
                Claim(
                    norm=norm,
                    against=against,
                    metric=metric,
                    source=record["source"],
                    printed=values[0] - values[1],
                    measured=measured if comparison.race is None else untested(measured),
                )
            )
    return found


def _key(record: PaperRecord, norm: str) -> tuple[str, str, str, str, str]:
    """Return a key of a norm's value; tables of the same paper share their rows."""
    paper = record["source"].partition(",")[0]
    return paper, record["dataset"], record["placement"], record["metric"], norm


# The document.


_GAP: Final = f"gap to {REFERENCE}"


def results_document(folders: Sequence[Path]) -> str:
    """Return a document with a section for each comparison; parts of one are joined.

    Raises:
        InputError: a folder is not a comparison, a file in it is damaged, or two have the same run.
    """
    comparisons = joined(map(read_comparison, folders))
    module = rendered(
        "results.md",
        comparisons=comparisons,
        claims_table=_claims_table,
        norm_table=_norm_table,
        power=f"{100 * POWER:.0f}",
        summarize=summarize,
        tables=comparison_tables,
        tuned=tuning,
    )
    return f"{module.explanation()}\n\n" + "\n".join(map(module.section, comparisons))


def _norm_table(comparison: Comparison) -> Table:
    """Return the table of norms with paired tests, and published results if there may be any."""
    rows = summarize(comparison)
    if comparison.has_known_measure:
        return Table.of(_lines(comparison, rows), ("norm", "paper"))
    columns: list[Column[SummaryRow]] = []
    for column in Table.filled(norm_columns(comparison), rows).columns:
        if column.key == "gap":
            columns += [
                Column(heading, partial(_test_of, comparison, heading))
                for heading in tested_cells(None, 0, _GAP)
            ]
        elif column.key != "interval":
            columns.append(column)
        if column.key == "test":
            columns.append(Column("seeds", _num_seeds))
    return Table(columns, rows)


def _test_of(comparison: Comparison, heading: str, row: SummaryRow) -> str:
    return tested_cells(row.gap, comparison.measure.decimals, _GAP)[heading]


def _lines(comparison: Comparison, rows: Sequence[SummaryRow]) -> Iterator[dict[str, str]]:
    papers = _by_norm(comparison.paper, comparison.metric)
    seen = set()
    for row in rows:
        if row.is_baseline and row.test is None:
            # The baseline has no such measure, for example frequencies of transitions have no arcs.
            continue
        keys = {(run.name, run.placement) for run in row.runs}
        seen |= keys
        yield {
            "norm": f"{row.label}{' (baseline)' * row.is_baseline}",
            "paper": next((papers[key] for key in keys if key in papers), NOTHING),
            "measured": _measured(row),
            "seeds": _num_seeds(row),
            **tested_cells(row.gap, comparison.measure.decimals, _GAP),
            "TID, %": tid_text(row, "avg"),
        }
    for (norm, placement), text in papers.items():
        if (norm, placement) not in seen:
            untested = tested_cells(None, 0, _GAP) | {"TID, %": NOTHING}
            yield {"norm": norm, "paper": text, "measured": NOT_RUN, "seeds": "", **untested}


def _num_seeds(row: SummaryRow) -> str:
    return "" if row.is_baseline else str(0 if row.test is None else row.test.count)


def _measured(row: SummaryRow) -> str:
    if row.test is None:
        return numerals.mark(row.statuses)
    text = numerals.spread(row.test)
    return text if row.complete else f"{text}; {numerals.outcome(row.statuses)}"


def _by_norm(records: Sequence[PaperRecord], metric: str) -> dict[tuple[str, str], str]:
    """Return the published values of the metric by norm and placement."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["metric"] == metric:
            text = printed_with_source(record, records)
            found.setdefault((record["norm"], record["placement"]), []).append(text)
    return {key: "; ".join(texts) for key, texts in found.items()}


def _claims_table(comparison: Comparison) -> Table | None:
    """Return the published differences that were measured; None without any."""
    lines = [
        {
            "norm": claim.norm,
            "against": claim.against,
            "measure": heading_of(claim.metric),
            "paper": f"{claim.printed:+.2f}",
            "measured": numerals.interval(claim.measured, measure_of(claim.metric).decimals),
            "p": numerals.probability(claim.measured.p),
            "the paper's sign is": WORDS[claim.outcome],
            "from": claim.source,
        }
        for claim in claims(comparison)
        if claim.measured is not None
    ]
    texts = ("norm", "against", "measure", "the paper's sign is", "from")
    return Table.of(lines, texts) if lines else None
