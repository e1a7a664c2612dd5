"""The page of results: comparisons beside the papers' numbers, as Markdown from their files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from powernorm.lab.report import numerals
from powernorm.lab.report.changes import changes_sentence, changes_table
from powernorm.lab.report.claims import WORDS, Claim, claims
from powernorm.lab.report.columns import columns_of
from powernorm.lab.report.comparison_tables import FOOTNOTE, any_partial
from powernorm.lab.report.joining import joined
from powernorm.lab.report.loading import read_comparison
from powernorm.lab.report.measures import better_way, decimals_of, heading_of
from powernorm.lab.report.numerals import counted
from powernorm.lab.report.paired import PairedGap, paired_gap, untested
from powernorm.lab.report.paper_tables import printed_with_source
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.seed_statistics import POWER, SeedRow, needed, seed_rows
from powernorm.lab.report.summary import SummaryRow, summarize
from powernorm.lab.report.tables import Table, code, escaped
from powernorm.lab.report.tuning import budget_table, ranges_table, tuning_sentence
from powernorm.runs import PaperRecord

_EXPLANATION: Final = (
    "Measured: mean ± sample standard deviation over the seeds that finished. The gap to `ln` "
    "(with the same remark, where there is one) is the mean of the seeds' differences, with its "
    "95 % interval and the p of the paired t-test (two-sided), alone and corrected for the number "
    "of norms (Holm); all need three seeds. Seeds needed: by so many the test shows a gap of this "
    f"size and scatter with a chance of {100 * POWER:.0f} %, roughly. {{split}}TID: two-pass, of "
    "the mean and of the deviation, averaged over the norm layers, in percent."
)
_SPLIT: Final = (
    "All seeds {whose}have the same split of the data: they say how the training varies, and "
    "nothing of how other test data would. "
)

_HEADINGS: Final = (
    "norm",
    "paper",
    "measured",
    "seeds",
    "gap to ln",
    "p",
    "p (Holm)",
    "seeds needed",
    "TID, %",
)
_NUMERIC: Final = (False, False, *(True for _ in _HEADINGS[2:]))
_CLAIM_HEADINGS: Final = (
    "norm",
    "against",
    "measure",
    "paper",
    "measured",
    "p",
    "the paper's sign is",
    "from",
)
_CLAIM_NUMERIC: Final = (False, False, False, True, True, True, False, False)


def results_document(folders: Sequence[Path]) -> str:
    """The sections of several comparisons, in the order given; parts of one stand together.

    Raises:
        InputError: a folder is no comparison, a file in it is damaged, or two hold the same run.
    """
    comparisons = joined(map(read_comparison, folders))
    return "\n".join([f"{_explanation(comparisons)}\n", *map(_section, comparisons)])


def _explanation(comparisons: Sequence[Comparison]) -> str:
    """Of the data of an own function nothing is known."""
    own = [one.function is not None for one in comparisons]
    split = _SPLIT.format(whose="of a built-in task " if any(own) else "")
    return _EXPLANATION.format(split="" if all(own) else split)


def _section(comparison: Comparison) -> str:
    table = (
        Table(_HEADINGS, _NUMERIC, list(_lines(comparison))).markdown()
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
        parts.append(
            Table(_CLAIM_HEADINGS, _CLAIM_NUMERIC, list(map(_claim_line, measured))).markdown()
        )
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
    """How it was made: command, data, hardware, date, and how it is not what the paper did."""
    preset = f" --preset {comparison.preset}" if comparison.preset else ""
    # A study may be one of the user's own, which no command trains.
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


def _lines(comparison: Comparison) -> Iterator[list[str]]:
    papers = _by_norm(comparison.paper, comparison.metric)
    seen = set()
    rows = summarize(comparison)
    of_seeds = {row.label: row for row in seed_rows(comparison, rows)}
    for row in rows:
        if row.is_baseline and row.test is None:
            # The measure means nothing to it, such as arcs to the frequencies of transitions.
            continue
        keys = {(run.name, run.placement) for run in row.runs}
        seen |= keys
        gap = _gap(comparison, row)
        yield [
            f"{row.label}{' (baseline)' * row.is_baseline}",
            next((papers[key] for key in keys if key in papers), numerals.NOTHING),
            _measured(row),
            "" if row.is_baseline else str(_num_seeds(row)),
            numerals.interval(gap, comparison.measure.decimals),
            *_tested(gap, None if row.is_baseline else of_seeds.get(row.label)),
            _tid(row),
        ]
    for (norm, placement), text in papers.items():
        if (norm, placement) not in seen:
            yield [norm, text, "not run", "", *[numerals.NOTHING] * len(_HEADINGS[4:])]


def _gap(comparison: Comparison, row: SummaryRow) -> PairedGap | None:
    """The gap of a norm; without interval and p in a race."""
    gap = paired_gap(row.runs, row.references, comparison.metric)
    return gap if comparison.race is None else untested(gap)


def _tested(gap: PairedGap | None, seeds: SeedRow | None) -> list[str]:
    """The p of a norm, alone and corrected, and the seeds that its gap would need."""
    return [
        numerals.probability(None if gap is None else gap.p),
        numerals.probability(None if seeds is None else seeds.adjusted_p),
        numerals.NOTHING if seeds is None else needed(seeds),
    ]


def _own_table(comparison: Comparison) -> str:
    """The columns of the report, with the paired test beside the gap and the number of seeds."""
    columns = columns_of(comparison)
    rows = summarize(comparison)
    of_seeds = {row.label: row for row in seed_rows(comparison, rows)}
    headings: list[str] = []
    numeric: list[bool] = []
    lines: list[list[str]] = [[] for _ in rows]

    def add(heading: str, texts: Iterable[str], *, is_number: bool = True) -> None:
        headings.append(heading)
        numeric.append(is_number)
        for line, text in zip(lines, texts, strict=True):
            line.append(text)

    for column in columns:
        if column.key == "gap":
            gaps = [_gap(comparison, row) for row in rows]
            add(
                column.heading,
                [numerals.interval(gap, comparison.measure.decimals) for gap in gaps],
            )
            tested = [
                _tested(gap, None if row.is_baseline else of_seeds.get(row.label))
                for gap, row in zip(gaps, rows, strict=True)
            ]
            for heading, texts in zip(_HEADINGS[5:8], zip(*tested, strict=True), strict=True):
                add(heading, texts)
        else:
            add(column.heading, map(column.text, rows), is_number=column.numeric)
        if column.key == "test":
            add("seeds", ["" if row.is_baseline else str(_num_seeds(row)) for row in rows])
    # An asterisk at the beginning of a line would begin a list.
    note = f"\n\\{FOOTNOTE}\n" if any_partial(rows) else ""
    return Table(headings, numeric, lines).markdown() + note


def _num_seeds(row: SummaryRow) -> int:
    return 0 if row.test is None else row.test.count


def _measured(row: SummaryRow) -> str:
    if row.test is None:
        return numerals.NOTHING if row.complete else numerals.mark(row.statuses)
    text = numerals.spread(row.test)
    return text if row.complete else f"{text}; {numerals.outcome(row.statuses)}"


def _tid(row: SummaryRow) -> str:
    tid = row.tid or {}
    parts = [tid.get("mean_avg"), tid.get("var_avg")]
    if all(part is None for part in parts):
        return numerals.NOTHING
    return " / ".join(numerals.percent(part) for part in parts)


def _by_norm(records: Sequence[PaperRecord], metric: str) -> dict[tuple[str, str], str]:
    """What the papers print of the measure, by norm and placement."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["metric"] == metric:
            text = printed_with_source(record, records)
            found.setdefault((record["norm"], record["placement"]), []).append(text)
    return {key: "; ".join(texts) for key, texts in found.items()}


def _claim_line(claim: Claim) -> list[str]:
    return [
        claim.norm,
        claim.against,
        heading_of(claim.metric),
        f"{claim.printed:+.2f}",
        numerals.interval(claim.measured, decimals_of(claim.metric)),
        numerals.probability(None if claim.measured is None else claim.measured.p),
        WORDS[claim.outcome],
        claim.source,
    ]
