"""Results of comparisons next to published results, as Markdown."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard

from powernorm.errors import InputError
from powernorm_lab.report import numerals
from powernorm_lab.report.columns import norm_columns, tid_text
from powernorm_lab.report.comparison_tables import (
    FOOTNOTE,
    any_partial,
    changes_sentence,
    changes_table,
)
from powernorm_lab.report.loading import read_comparison
from powernorm_lab.report.measures import better_way, heading_of, measure_of
from powernorm_lab.report.numerals import counted
from powernorm_lab.report.paper_tables import printed_with_source
from powernorm_lab.report.records import Comparison, runs_of
from powernorm_lab.report.seed_statistics import POWER, seed_records, tested_cells
from powernorm_lab.report.summary import (
    LEAST_SEEDS,
    REFERENCE,
    PairedGap,
    SummaryRow,
    paired_gap,
    summarize,
    untested,
)
from powernorm_lab.report.tables import Table, code, escaped
from powernorm_lab.report.tuning import budget_table, ranges_table, tuning_sentence
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
        dataset: data set of the paper.
        printed: published value of the norm minus that of `against`.
        measured: the same difference here, paired by seed; None if one of the two was not run.
    """

    norm: str
    against: str
    metric: str
    source: str
    dataset: str
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
    return list(_claims(comparison))


def _claims(comparison: Comparison) -> Iterator[Claim]:
    printed = {_key(record, record["norm"]): record["value"] for record in comparison.paper}
    for record in comparison.paper:
        for against in record.get("against", [REFERENCE]):
            value, reference = record["value"], printed.get(_key(record, against))
            if record["norm"] == against or not _is_number(value) or not _is_number(reference):
                continue
            runs, theirs = (
                runs_of(comparison.runs, norm, record["placement"])
                for norm in (record["norm"], against)
            )
            measured = paired_gap(runs, theirs, record["metric"])
            yield Claim(
                norm=record["norm"],
                against=against,
                metric=record["metric"],
                source=record["source"],
                dataset=record["dataset"],
                printed=value - reference,
                measured=measured if comparison.race is None else untested(measured),
            )


def _key(record: PaperRecord, norm: str) -> tuple[str, str, str, str, str]:
    """Return a key of a norm's value; tables of the same paper share their rows."""
    paper = record["source"].partition(",")[0]
    return paper, record["dataset"], record["placement"], record["metric"], norm


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)


_EXPLANATION: Final = (
    "Measured: mean ± sample standard deviation over the seeds that finished. The gap to `ln` "
    "(with the same remark, where there is one) is the mean of the seeds' differences, with its "
    "95 % interval and the p of the paired t-test (two-sided), alone and corrected for the number "
    "of norms (Holm); all need three seeds. Seeds needed: rough number for which the test detects "
    f"a gap of this size and spread with a power of {100 * POWER:.0f} %. {{split}}TID: two-pass, "
    "of the mean and of the deviation, averaged over the norm layers, in percent."
)
_SPLIT: Final = (
    "All seeds {whose}have the same split of the data: they show the variation of the training, "
    "not that of other test data. "
)

_GAP: Final = f"gap to {REFERENCE}"
_EMPTY: Final = (_GAP, "p", "p (Holm)", "seeds needed", "TID, %")
"""Columns that are empty for a norm that was not run."""


def results_document(folders: Sequence[Path]) -> str:
    """Return a document with a section for each comparison; parts of one are joined.

    Raises:
        InputError: a folder is not a comparison, a file in it is damaged, or two have the same run.
    """
    comparisons = joined(map(read_comparison, folders))
    return "\n".join([f"{_explanation(comparisons)}\n", *map(_section, comparisons)])


def _explanation(comparisons: Sequence[Comparison]) -> str:
    """Explain the columns; the split of a user's function is not known."""
    own = [one.function is not None for one in comparisons]
    split = _SPLIT.format(whose="of a built-in task " if any(own) else "")
    return _EXPLANATION.format(split="" if all(own) else split)


def _section(comparison: Comparison) -> str:
    table = (
        Table.of(_lines(comparison), ("norm", "paper")).markdown()
        if comparison.has_known_measure
        else _own_table(comparison)
    )
    parts = [f"### {escaped(_title(comparison))}\n", f"{_facts(comparison)}\n", table]
    if comparison.tuning is not None:
        parts.append(f"\n{tuning_sentence(comparison.tuning)}\n")
        parts.append(budget_table(comparison.tuning).markdown())
        parts.append("\nThe ranges:\n")
        parts.append(ranges_table(comparison.tuning).markdown())
    found = claims(comparison)
    measured = [claim for claim in found if claim.measured is not None]
    if measured:
        parts.append("\nDifferences, the paper's and ours:\n")
        texts = ("norm", "against", "measure", "the paper's sign is", "from")
        parts.append(Table.of(map(_claim_line, measured), texts).markdown())
    if comparison.changes is not None:
        parts.append("\nSettings, ours and the preset's:\n")
        parts.append(changes_table(comparison.changes).markdown())
    return "\n".join(parts)


def _title(comparison: Comparison) -> str:
    study = "" if comparison.study is None else f", study {comparison.study['name']}"
    preset = f", {comparison.preset}" if comparison.preset else ""
    tuned = "" if comparison.tuning is None else ", tuned"
    return f"{comparison.task}{preset}{study}{tuned}"


def _facts(comparison: Comparison) -> str:
    """Return command, data, hardware, date, and differences from the paper."""
    preset = f" --preset {comparison.preset}" if comparison.preset else ""
    # A user-defined study has no command.
    verb = "compare" if comparison.tuning is None else "tune"
    budget = "" if comparison.tuning is None else f" --trials {comparison.tuning['num_trials']}"
    made = (
        code(f"powernorm {verb} {comparison.task}{preset}{budget}")
        if comparison.study is None
        else escaped(comparison.study["title"])
    )
    placed = f", {escaped(comparison.where)}" if comparison.where else ""
    way = "" if comparison.has_known_measure else f" ({better_way(comparison.measure)} is better)"
    measure = escaped(comparison.measure.heading)
    sentences = [
        f"{made}{placed}; the measure is the {measure}{way}.",
        *_function(comparison),
        *_data(comparison.data),
        *_environment(comparison.settings),
    ]
    about = "Not as in the paper: " if comparison.paper and comparison.study is None else ""
    notes = [escaped(comparison.reduced)] if comparison.reduced else []
    if comparison.changes is not None:
        notes.append(f"{escaped(changes_sentence(comparison.changes))}, as listed below.")
    if notes:
        notes[0] = about + notes[0]
    return " ".join([*sentences, *notes])


def _function(comparison: Comparison) -> Iterator[str]:
    function = comparison.function
    if function is not None and function["file"] is not None:
        digest = f" (sha256 {function['sha256'][:12]})" if function["sha256"] else ""
        yield f"The function is in {escaped(function['file'] + digest)}."


def _data(data: Mapping[str, Any]) -> Iterator[str]:
    if data.get("name"):
        yield f"Data: {escaped(str(data['name']))}, {escaped(str(data.get('source', '')))}."


def _environment(settings: Mapping[str, Any]) -> Iterator[str]:
    machine, versions = (settings.get(key) for key in ("machine", "versions"))
    if isinstance(machine, Mapping) and isinstance(versions, Mapping | None):
        threads = counted(machine.get("num_threads", 1), "thread")
        device = machine.get("gpu") or f"{machine.get('num_cpus')} CPU cores, {threads}"
        torch = (versions or {}).get("torch")
        date = f", {escaped(str(settings['date']))}" if settings.get("date") else ""
        yield f"On {escaped(str(device))}, torch {escaped(str(torch))}{date}."


def _lines(comparison: Comparison) -> Iterator[dict[str, str]]:
    papers = _by_norm(comparison.paper, comparison.metric)
    seen = set()
    for row, tested in _with_tests(comparison):
        if row.is_baseline and row.test is None:
            # The baseline has no such measure, for example frequencies of transitions have no arcs.
            continue
        keys = {(run.name, run.placement) for run in row.runs}
        seen |= keys
        yield {
            "norm": f"{row.label}{' (baseline)' * row.is_baseline}",
            "paper": next((papers[key] for key in keys if key in papers), numerals.NOTHING),
            "measured": _measured(row),
            "seeds": _num_seeds(row),
            **tested,
            "TID, %": tid_text(row, "avg"),
        }
    for (norm, placement), text in papers.items():
        if (norm, placement) not in seen:
            empty = dict.fromkeys(_EMPTY, numerals.NOTHING)
            yield {"norm": norm, "paper": text, "measured": "not run", "seeds": "", **empty}


def _with_tests(comparison: Comparison) -> Iterator[tuple[SummaryRow, dict[str, str]]]:
    """Yield the rows of the table of norms with the cells of their paired tests."""
    rows = summarize(comparison)
    of_seeds = {record["label"]: record for record in seed_records(comparison, rows)}
    for row in rows:
        record = None if row.is_baseline else of_seeds.get(row.label)
        yield row, tested_cells(row.gap, record, comparison.measure.decimals, _GAP)


def _own_table(comparison: Comparison) -> str:
    """Return the report's columns with the paired test and the number of seeds."""
    found = list(_with_tests(comparison))
    rows = [row for row, _ in found]
    columns = [one for one in norm_columns(comparison, rows) if one.key != "interval"]
    headings: list[tuple[str, bool]] = []
    lines: list[list[str]] = [[] for _ in rows]
    for column in columns:
        is_gap, is_test = column.key == "gap", column.key == "test"
        headings += [(name, True) for name in _EMPTY[:-1]] if is_gap else []
        headings += [] if is_gap else [(column.heading, column.numeric)]
        headings += [("seeds", True)] * is_test
        for line, (row, tested) in zip(lines, found, strict=True):
            if is_gap:
                line += tested.values()
            elif column.of_norm:
                line.append(column.of_norm(row))
            line += [_num_seeds(row)] * is_test
    names, numeric = zip(*headings, strict=True)
    # An unescaped asterisk at the beginning of a line would start a list.
    note = f"\n\\{FOOTNOTE}\n" if any_partial(rows) else ""
    return Table(names, numeric, lines).markdown() + note


def _num_seeds(row: SummaryRow) -> str:
    return "" if row.is_baseline else str(0 if row.test is None else row.test.count)


def _measured(row: SummaryRow) -> str:
    if row.test is None:
        return numerals.NOTHING if row.complete else numerals.mark(row.statuses)
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


def _claim_line(claim: Claim) -> dict[str, str]:
    return {
        "norm": claim.norm,
        "against": claim.against,
        "measure": heading_of(claim.metric),
        "paper": f"{claim.printed:+.2f}",
        "measured": numerals.interval(claim.measured, measure_of(claim.metric).decimals),
        "p": numerals.probability(None if claim.measured is None else claim.measured.p),
        "the paper's sign is": WORDS[claim.outcome],
        "from": claim.source,
    }
