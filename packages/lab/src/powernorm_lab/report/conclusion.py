"""Conclusion of a comparison, as far as its seeds, baselines and race permit one; their tables."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from statistics import fmean
from typing import Final

from powernorm_lab.engine.race_words import drop_sentences, end_sentence
from powernorm_lab.report import numerals
from powernorm_lab.report.measures import heading_of
from powernorm_lab.report.numerals import NOTHING
from powernorm_lab.report.records import Comparison
from powernorm_lab.report.statistics import (
    CONFIDENCE,
    LEAST_SEEDS,
    MOST_SEEDS,
    REFERENCE,
    PairedGap,
    SummaryRow,
    best_baseline,
    is_better,
    seed_records,
    summarize,
)
from powernorm_lab.report.tables import Table
from powernorm_lab.runs import RaceRecord

MAX_NAMES: Final = 12
"""Largest number of norms named in a sentence; further ones are counted."""
LONGEST_NAME: Final = 80

_Tested = tuple[SummaryRow, PairedGap]


def conclusion(comparison: Comparison, rows: Sequence[SummaryRow] | None = None) -> list[str]:
    """Return the conclusions of a comparison, with one or two sentences each.

    Args:
        comparison: the comparison.
        rows: rows of `summarize`; None computes them.
    """
    rows = summarize(comparison) if rows is None else rows
    norms = [row for row in rows if not row.is_baseline]
    measured = [row for row in norms if row.test is not None]
    if not measured:
        return ["No run has finished with a result: no conclusion."]
    return [
        *_against_baselines(comparison, rows, measured),
        *(
            _against_reference(comparison, measured)
            if comparison.race is None
            else race_sentences(comparison)
        ),
        *_without_result(norms),
    ]


def _against_baselines(
    comparison: Comparison, rows: Sequence[SummaryRow], measured: Sequence[SummaryRow]
) -> Iterator[str]:
    baseline = best_baseline(rows, comparison.measure)
    if baseline is None:
        return
    name, value = baseline
    behind = [
        row.label
        for row in measured
        if row.test and not is_better(row.test.mean, value, comparison.measure)
    ]
    named = f"the {numerals.printable(name)} baseline ({numerals.number(value)})"
    if len(behind) == len(measured):
        yield f"No norm beats {named}."
    elif behind:
        yield f"No better than {named}: {_listed(behind)}."


def _against_reference(comparison: Comparison, measured: Sequence[SummaryRow]) -> Iterator[str]:
    """Yield the norms that differ from LayerNorm in the paired test, or why there is no test."""
    if len(measured) < 2:
        yield "One norm has a result: nothing to compare."
        return
    seeds = max(row.test.count for row in measured if row.test)
    if seeds < 2:
        yield "One seed: no conclusion. The variation over seeds is not known."
        return
    gaps = [(row, row.gap) for row in measured if row.gap is not None]
    if not any(REFERENCE in (run.name, run.norm) for run in comparison.runs):
        yield (
            f"No test: it compares norms with {REFERENCE}, which is not among them; --resume can "
            "add it."
        )
        return
    if not gaps:
        yield f"No test: no seed finished both with {REFERENCE} and with another norm."
        return
    tested = [(row, gap) for row, gap in gaps if gap.is_tested]
    if not tested:
        yield (
            f"{seeds} seeds: no conclusion. The paired test needs {LEAST_SEEDS} that finished "
            f"both with {REFERENCE} and with the other norm."
        )
        return
    yield from _differences(comparison, tested)
    untested = [row.label for row, gap in gaps if not gap.is_tested]
    if untested:
        yield f"Fewer than {LEAST_SEEDS} seeds, so no test: {_listed(untested)}."
    yield _method(tested)


def _differences(comparison: Comparison, tested: Sequence[_Tested]) -> Iterator[str]:
    measure = comparison.measure
    sides: dict[str, list[str]] = {"Better": [], "Worse": []}
    for row, gap in tested:
        if gap.is_told:
            side = "Better" if is_better(gap.difference, 0, measure) else "Worse"
            sides[side].append(f"{row.label} {numerals.interval(gap, measure.decimals)}")
    for side, names in sides.items():
        if names:
            yield f"{side} than {REFERENCE} in {measure.heading}: {_listed(names)}."
    others = [row.label for row, gap in tested if not gap.is_told]
    if others:
        yield f"Not told apart from {REFERENCE} by these seeds: {_listed(others)}."


def _method(tested: Sequence[_Tested]) -> str:
    corrected = f", corrected for {len(tested)} norms (Holm)" if len(tested) > 1 else ""
    marked = (
        f" A norm with a remark is held against {REFERENCE} with the same."
        if any(row.remark for row, _ in tested)
        else ""
    )
    confidence, error = (f"{100 * part:.0f} %" for part in (CONFIDENCE, 1 - CONFIDENCE))
    return (
        f"By the paired t-test over the seeds, two-sided, at {error}{corrected}; in parentheses "
        f"the {confidence} interval of a difference.{marked}"
    )


def _without_result(norms: Iterable[SummaryRow]) -> Iterator[str]:
    lost = [
        f"{row.label} ({numerals.mark(row.statuses)})"
        for row in norms
        if row.test is None and not row.complete
    ]
    if lost:
        yield f"No finished run: {_listed(lost)}."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(numerals.shorten(name, LONGEST_NAME) for name in names[:MAX_NAMES])
    more = len(names) - MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def race_sentences(comparison: Comparison) -> Iterator[str]:
    """Yield the conclusions of a race, which replace tests for a fixed number of seeds.

    Args:
        comparison: comparison with a race.
    """
    race, standing = comparison.race, comparison.standing
    assert race is not None
    if standing is None:
        yield "Parts of a race: no conclusion. Each part has its own report."
        return
    yield from drop_sentences(standing)
    yield end_sentence(standing)
    yield (
        f"The best norm stays in with a confidence of {100 * race['confidence']:g} %, by a paired "
        f"test of the {heading_of(standing['metric'])} that is valid after every seed."
    )
    saved = _saved(comparison, standing)
    if saved:
        yield saved


def _saved(comparison: Comparison, standing: RaceRecord) -> str:
    """Return a sentence about the number of saved runs and their approximate duration."""
    seeds = comparison.settings.get("seeds")
    if standing["outcome"] == "open" or not isinstance(seeds, list):
        return ""
    names = (*standing["left"], *(drop["label"] for drop in standing["dropped"]))
    num_saved, seconds, spent = 0, 0.0, 0.0
    for name in names:
        times = [
            run.seconds
            for run in comparison.runs
            if run.name == name and run.seed in seeds and run.status != "dropped"
        ]
        num_saved += len(seeds) - len(times)
        seconds += (len(seeds) - len(times)) * (fmean(times) if times else 0.0)
        spent += sum(times)
    total = len(names) * len(seeds)
    if not num_saved:
        return f"All {total} runs were needed."
    share = f", {100 * seconds / (seconds + spent):.0f} % of the time" if seconds + spent else ""
    return (
        f"{num_saved} of {total} runs were not needed: about {numerals.duration(seconds)}{share}."
    )


# Tables.


def seed_table(comparison: Comparison, rows: Sequence[SummaryRow]) -> Table | None:
    """Return the table of statistics over seeds; None if the seeds are too few.

    Args:
        comparison: the comparison.
        rows: rows of `summarize`.
    """
    found = seed_records(comparison, rows)
    is_tested = any(row.gap is not None and row.gap.is_tested for row in rows)
    if not is_tested and all(record["mean_interval"] is None for record in found):
        return None
    decimals = comparison.measure.decimals
    gaps = {row.label: row.gap for row in rows}
    lines = [
        {
            "norm": record["label"],
            "seeds": str(record["seeds"]),
            "mean (95 %)": _estimate(record["mean"], record["mean_interval"], decimals),
            "middle half (95 %)": _estimate(
                record["interquartile_mean"], record["interquartile_mean_interval"], decimals
            ),
        }
        | (tested_cells(gaps[record["label"]], decimals, "gap (95 %)") if is_tested else {})
        for record in found
    ]
    return Table.of(lines, ["norm"])


def tested_cells(gap: PairedGap | None, decimals: int, heading: str) -> dict[str, str]:
    """Return the cells of a norm's gap, its p, alone and corrected, and the seeds needed."""
    needed = NOTHING
    if gap is not None and gap.is_tested:
        number = gap.seeds_needed
        needed = f"> {MOST_SEEDS:,}" if number is None else str(number)
    return {
        heading: numerals.interval(gap, decimals),
        "p": numerals.probability(None if gap is None else gap.p),
        "p (Holm)": numerals.probability(None if gap is None else gap.adjusted_p),
        "seeds needed": needed,
    }


def _estimate(value: float, interval: Sequence[float] | None, decimals: int) -> str:
    text = numerals.number(value, decimals)
    if interval is None:
        return text
    return f"{text} ({' to '.join(numerals.number(end, decimals) for end in interval)})"


def race_table(comparison: Comparison) -> Table:
    """Return the table of a race with a result: norms that are left, then the dropped ones."""
    standing = comparison.standing
    assert standing is not None
    dropped = {drop["label"]: drop for drop in standing["dropped"]}
    last = {name: drop["after"] for name, drop in dropped.items()}
    places = sorted(
        [*standing["left"], *dropped],
        key=lambda one: (-last.get(one, inf), one != standing["leader"]),
    )
    lines = []
    for name in places:
        finished = sum(run.name == name and run.finished for run in comparison.runs)
        line = {"norm": name, "seeds finished": str(finished)}
        if drop := dropped.get(name):
            by = [
                NOTHING if value is None else f"{value:.3g}"
                for value in (drop["difference"], drop["at_least"])
            ]
            cells = (f"out after {numerals.counted(drop['after'], 'seed')}", drop["behind"], *by)
        else:
            cells = ("leads" if name == standing["leader"] else "still in", "", "", "")
        headings = ("race", "leader then", "behind by", "at least by")
        lines.append(line | dict(zip(headings, cells, strict=True)))
    return Table.of(lines, ("norm", "race", "leader then"))
