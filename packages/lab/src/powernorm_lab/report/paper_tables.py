"""Published and measured values: results, TID and scores by kind of statistics."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isinf
from typing import Final

from markupsafe import Markup

from powernorm.records import DiagnosisRecord, EvaluationRow, PaperStatistic
from powernorm_lab.report import numerals
from powernorm_lab.report.comparison_tables import difference_note
from powernorm_lab.report.measures import MEASURES, heading_of
from powernorm_lab.report.numerals import NOTHING, printable
from powernorm_lab.report.records import Comparison, ReportedRun, runs_of
from powernorm_lab.report.summary import average, spread, spread_of
from powernorm_lab.report.tables import Table, copies
from powernorm_lab.runs import PaperRecord

TID_HEADINGS: Final[Mapping[str, str]] = {
    "mean_last": "mean TID, last norm, %",
    "var_last": "var TID, last norm, %",
    "mean_avg": "mean TID, average, %",
    "var_avg": "var TID, average, %",
}
"""Headings by the keys of `powernorm.records.TID`."""

SCORES_CAPTION: Final = (
    "Score of the same weights by the statistics that the norms evaluate with: mean ± sample "
    "standard deviation over the scored seeds. A size is the largest number of positions in a "
    "batch, padding included, if batches are cut by tokens, else the approximate number of tokens."
)

Kind = tuple[str, int | None]
"""Kind of statistics, and the size of the batch for batch statistics."""


def kind_of(row: EvaluationRow | PaperStatistic) -> Kind:
    """Return kind and size of statistics, which identify rows of an evaluation or a paper."""
    return row.get("statistics", ""), row.get("size")


def evaluation_table(record: DiagnosisRecord, *, has_tokens: bool = True) -> Table:
    """Return losses and scores by kind of statistics, with published scores in the last column.

    Args:
        record: the diagnosis.
        has_tokens: whether to include the number of tokens in a batch.
    """
    rows = record["evaluation"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("scores", {})))
    printed = {kind_of(one): one for one in _of_scores(record.get("paper", []), names)}
    tokens = ["tokens in a batch"] if has_tokens else []
    paper = [f"{one['dataset']}, paper" for one in list(printed.values())[:1]]
    headings = [
        *("statistics", *tokens, "loss"),
        *(printable(_score_heading(name)) for name in names),
        *map(printable, paper),
    ]
    lines = [
        [
            _words_of(kind_of(row)),
            *(NOTHING if row["tokens"] is None else f"{row['tokens']:,}" for _ in tokens),
            f"{row['loss']:.4f}",
            *(numerals.number(row.get("scores", {}).get(name), 2) for name in names),
            *(_printed(printed.get(kind_of(row))) for _ in paper),
        ]
        for row in rows
    ]
    return Table(headings, [heading != "statistics" for heading in headings], lines)


def tid_table(record: DiagnosisRecord) -> Table | None:
    """Return the TID of a diagnosis next to the published one; None without a published one."""
    printed = [one for one in record.get("paper", []) if one["metric"] in TID_HEADINGS]
    layers = record["layers"]
    if not printed or not layers:
        return None
    own = {
        "mean_last": layers[-1].get("mean_tid"),
        "var_last": layers[-1].get("var_tid"),
        "mean_avg": average(layers, "mean_tid"),
        "var_avg": average(layers, "var_tid"),
    }
    lines = [
        {
            "measure": TID_HEADINGS[one["metric"]],
            "here": numerals.percent(own[one["metric"]]),
            "paper": f"{one['value']:.1f} ({printable(one['source'])})",
            "paper's data": printable(one["dataset"]),
        }
        for one in printed
    ]
    return Table.of(lines, ("measure", "paper", "paper's data"))


def tid_lines(comparison: Comparison) -> list[list[str]]:
    """Return rows with the published and measured TID of each norm.

    A row has norm, placement, published value, measured value, measure, and the paper's data set.
    """
    return [
        [
            printable(one["norm"]),
            one["placement"],
            f"{one['value']:.1f} ({printable(one['source'])})",
            _measured_tid(runs_of(comparison.runs, one["norm"], one["placement"]), one),
            TID_HEADINGS[one["metric"]],
            printable(one["dataset"]),
        ]
        for one in comparison.paper_statistics
        if one["metric"] in TID_HEADINGS
    ]


def score_tables(comparisons: Sequence[Comparison]) -> list[tuple[str, Table]]:
    """Return the scores of norms and placements by kind of statistics, as W22's Tables 7 and 8.

    Args:
        comparisons: comparisons of one task; runs whose diagnoses have no scores are ignored.

    Returns:
        Headings and tables, first for running and re-estimated statistics, then for batch
        statistics; empty without a score.
    """
    runs = [run for one in comparisons for run in one.runs if run.finished and _scored(run)]
    if not runs:
        return []
    # Older results.json have no published statistics, but the diagnoses do.
    paper = [row for one in comparisons for row in one.paper_statistics]
    paper += [row for run in runs if run.diagnosis for row in run.diagnosis.get("paper", ())]
    metric = _metric(runs, paper, comparisons[0].metric)
    columns: dict[tuple[str, str], list[ReportedRun]] = {}
    for run in runs:
        columns.setdefault((run.placement or "", run.name), []).append(run)
    kinds = list(dict.fromkeys(kind_of(row) for run in runs for row in _scored(run)))
    printed: dict[tuple[str, str, Kind], PaperStatistic] = {
        (one["placement"], one["norm"], kind_of(one)): one for one in _of_scores(paper, [metric])
    }
    running = [kind for kind in kinds if kind[0] == "running"]
    estimated = [kind for kind in kinds if kind[0] not in ("running", "batch")]
    batch = sorted((kind for kind in kinds if kind[0] == "batch"), key=lambda kind: kind[1] or 0)
    name = printable(_score_heading(metric))
    dataset = next((printable(one["dataset"]) for one in printed.values()), "")
    beside = f"; paper: Wang et al. 2022, {{}}, {dataset}" if dataset else ""
    found = [
        (f"{name} by running and re-estimated statistics", "Table 7", [*running, *estimated]),
        (f"{name} by batch statistics", "Table 8", [*running, *batch]),
    ]
    return [
        (heading + beside.format(table), _score_table(columns, rows, metric, printed))
        for heading, table, rows in found
    ]


def score_contents(comparison: Comparison) -> list[Markup]:
    """Return the section of a comparison's page; empty without a score."""
    return [
        content
        for heading, table in score_tables([comparison])
        for content in (table.html(heading, f"{heading}. {SCORES_CAPTION}"), copies(table))
    ]


def _score_table(
    columns: Mapping[tuple[str, str], Sequence[ReportedRun]],
    kinds: Sequence[Kind],
    metric: str,
    printed: Mapping[tuple[str, str, Kind], PaperStatistic],
) -> Table:
    headings = ["statistics"]
    for placement, name in columns:
        headings.append(printable(" ".join(filter(None, (placement, name)))))
        if printed:
            headings.append("paper")
    lines = []
    for kind in kinds:
        line = [_words_of(kind)]
        for (placement, name), runs in columns.items():
            line.append(_spread(runs, kind, metric))
            if printed:
                line.append(_printed(printed.get((placement, name, kind))))
        lines.append(line)
    return Table(headings, [False, *[True] * (len(headings) - 1)], lines)


def _spread(runs: Iterable[ReportedRun], kind: Kind, metric: str) -> str:
    values = [
        value
        for run in runs
        for row in _scored(run)
        if kind_of(row) == kind and (value := row["scores"].get(metric)) is not None
    ]
    return numerals.spread(spread(values), 2)


def _scored(run: ReportedRun) -> list[EvaluationRow]:
    rows = [] if run.diagnosis is None else run.diagnosis["evaluation"]
    return [row for row in rows if "scores" in row]


def _metric(runs: Sequence[ReportedRun], paper: Iterable[PaperStatistic], goal: str) -> str:
    """Return the paper's metric, else the comparison's, for the scored split."""
    known = dict.fromkeys(name for run in runs for row in _scored(run) for name in row["scores"])
    wanted = [*(one["metric"] for one in paper if "statistics" in one), goal]
    for name in wanted:
        for split in ("test", "valid"):
            if (of_split := name.replace("test", split, 1)) in known:
                return of_split
    return next(iter(known))


def _of_scores(paper: Iterable[PaperStatistic], names: Sequence[str]) -> list[PaperStatistic]:
    """Return published scores of some metrics, which may be named for either split."""
    known = {name.replace("valid", "test", 1) for name in names}
    return [one for one in paper if "statistics" in one and one["metric"] in known]


def _measured_tid(ours: Sequence[ReportedRun], printed: PaperStatistic) -> str:
    values = [
        100 * value
        for run in ours
        if run.finished
        and run.tid is not None
        # A TypedDict takes literal keys only.
        and (value := dict[str, float | None](run.tid)[printed["metric"]]) is not None  # type: ignore[arg-type]
    ]
    if not values:
        return NOTHING if ours else "not run"
    return numerals.spread(spread(values), 2)


def _printed(one: PaperStatistic | None) -> str:
    return NOTHING if one is None else f"{one['value']:.1f}"


def _score_heading(metric: str) -> str:
    """Return the heading of a score of either split.

    >>> _score_heading("test_bleu"), _score_heading("valid_bleu"), _score_heading("valid_accuracy")
    ('test BLEU', 'valid BLEU', 'valid accuracy')
    """
    of_test = metric.replace("valid_", "test_", 1)
    if metric in MEASURES or of_test not in MEASURES:
        return heading_of(metric)
    return f"valid {heading_of(of_test).removeprefix('test ')}"


def statistic_label(one: PaperStatistic) -> str:
    """Describe a published statistic.

    >>> statistic_label(PaperStatistic(norm="bn", placement="pre", dataset="d", value=1.0,
    ...     metric="test_bleu_tokenised", source="s", statistics="batch", size=512))
    'BLEU tokenized, batch, 512'
    """
    if one["metric"] in TID_HEADINGS:
        return TID_HEADINGS[one["metric"]]
    return f"{heading_of(one['metric'])}, {_words_of(kind_of(one))}"


def _words_of(kind: Kind) -> str:
    statistics, size = kind
    return printable(statistics) if size is None else f"{printable(statistics)}, {size:,}"


HEADINGS: Final = ("norm", "placement", "paper", "measured", "measure", "paper's data")

NOT_RUN: Final = "not run"

CAPTION: Final = (
    "Published results with their tables, and ours: mean ± sample standard deviation over the "
    "seeds that finished."
)


def paper_table(comparison: Comparison) -> Table:
    """Return published results in the papers' order with ours, then the TID of the norms."""
    is_number = [heading == "measured" for heading in HEADINGS]
    return Table(HEADINGS, is_number, [*_lines(comparison), *tid_lines(comparison)], wide="paper")


def _lines(comparison: Comparison) -> Iterator[list[str]]:
    # Each measure has its own row; several papers may publish the same one.
    rows: dict[tuple[str, str, str, str], list[PaperRecord]] = {}
    for record in comparison.paper:
        key = record["norm"], record["placement"], record["dataset"], record["metric"]
        rows.setdefault(key, []).append(record)
    for (norm, placement, dataset, metric), records in rows.items():
        yield [
            printable(norm),
            placement,
            "; ".join(printed_with_source(record, comparison.paper) for record in records),
            _measured(runs_of(comparison.runs, norm, placement), metric),
            printable(heading_of(metric)),
            printable(dataset),
        ]


def printed_with_source(record: PaperRecord, beside: Iterable[PaperRecord]) -> str:
    """Format a published value with its source, see `_printed_value`."""
    return f"{_printed_value(record, beside)} ({printable(record['source'])})"


def _printed_value(record: PaperRecord, beside: Iterable[PaperRecord] = ()) -> str:
    """Format a published value with the paper's decimals; a score of 0 is a failure.

    Args:
        record: the value.
        beside: other values, including the rest of its column, whose longest value has all of the
            paper's decimals.
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
    """Return the paper's column, whose values have the same number of decimals."""
    return record["source"].partition(",")[0], record["dataset"], record["metric"]


def _decimals(value: float | None) -> int:
    """Return the number of decimals of a value as it was typed, at least 1.

    >>> _decimals(77.21), _decimals(35.0), _decimals(None)
    (2, 1, 1)
    """
    return 1 if value is None or isinf(value) else max(1, len(repr(value).partition(".")[2]))


def _measured(ours: Sequence[ReportedRun], metric: str) -> str:
    if not ours:
        return NOT_RUN
    value = spread_of(ours, metric)
    if value is None:
        broken = {run.shown_status: (run.seed,) for run in ours if not run.finished}
        return numerals.mark(broken)
    lost = len(ours) - sum(run.finished for run in ours)
    seeds = f"{value.count} of {len(ours)}" if lost else str(value.count)
    return f"{numerals.spread(value)} ({seeds} {'seed' if len(ours) == 1 else 'seeds'})"


def paper_contents(comparison: Comparison) -> list[Markup]:
    """Return the contents of the section; empty without published results."""
    if not comparison.paper:
        return []
    table = paper_table(comparison)
    return [*difference_note(comparison), table.html("Paper and measured", CAPTION), copies(table)]
