"""Published and measured values: results, TID and scores by kind of statistics."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isinf
from typing import Final

from powernorm.records import DiagnosisRecord, EvaluationRow, PaperStatistic
from powernorm_lab.report import numerals
from powernorm_lab.report.measures import MEASURES, heading_of
from powernorm_lab.report.numerals import NOTHING
from powernorm_lab.report.records import Comparison, ReportedRun, runs_of
from powernorm_lab.report.statistics import average, spread, values_by_seed
from powernorm_lab.report.tables import Column, Table
from powernorm_lab.runs import PaperRecord

TID_HEADINGS: Final[Mapping[str, str]] = {
    "mean_last": "mean TID, last norm, %",
    "var_last": "var TID, last norm, %",
    "mean_avg": "mean TID, average, %",
    "var_avg": "var TID, average, %",
}
"""Headings by the keys of `powernorm.records.TID`."""

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
    columns: list[Column[EvaluationRow]] = [
        Column("statistics", lambda row: _words_of(kind_of(row)), numeric=False)
    ]
    if has_tokens:
        columns.append(Column("tokens in a batch", lambda row: _count(row["tokens"])))
    columns.append(Column("loss", lambda row: f"{row['loss']:.4f}"))
    columns += [Column(_score_heading(name), partial(_score, name)) for name in names]
    for one in list(printed.values())[:1]:
        heading = f"{one['dataset']}, paper"
        columns.append(Column(heading, lambda row: _printed(printed.get(kind_of(row)))))
    return Table(columns, rows)


def _score(name: str, row: EvaluationRow) -> str:
    return numerals.number(row.get("scores", {}).get(name), 2)


def _count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}"


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
            "paper": f"{one['value']:.1f} ({one['source']})",
            "paper's data": one["dataset"],
        }
        for one in printed
    ]
    return Table.of(lines, ("measure", "paper", "paper's data"))


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
    groups: dict[tuple[str, str], list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault((run.placement or "", run.name), []).append(run)
    kinds = list(dict.fromkeys(kind_of(row) for run in runs for row in _scored(run)))
    printed: dict[tuple[tuple[str, str], Kind], PaperStatistic] = {
        ((one["placement"], one["norm"]), kind_of(one)): one for one in _of_scores(paper, [metric])
    }
    columns: list[Column[Kind]] = [Column("statistics", _words_of, numeric=False)]
    for key, seeds in groups.items():
        columns.append(Column(" ".join(filter(None, key)), partial(_spread, seeds, metric)))
        if printed:
            published = {kind: printed.get((key, kind)) for kind in kinds}
            columns.append(Column("paper", partial(_printed_of, published)))
    running = [kind for kind in kinds if kind[0] == "running"]
    estimated = [kind for kind in kinds if kind[0] not in ("running", "batch")]
    batch = sorted((kind for kind in kinds if kind[0] == "batch"), key=lambda kind: kind[1] or 0)
    dataset = next((one["dataset"] for one in printed.values()), "")
    beside = f"; paper: Wang et al. 2022, {{}}, {dataset}" if dataset else ""
    found = (
        ("running and re-estimated", "Table 7", [*running, *estimated]),
        ("batch", "Table 8", [*running, *batch]),
    )
    return [
        (
            f"{_score_heading(metric)} by {kind} statistics{beside.format(table)}",
            Table(columns, rows),
        )
        for kind, table, rows in found
    ]


def _spread(runs: Iterable[ReportedRun], metric: str, kind: Kind) -> str:
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


def _measured_tid(ours: Sequence[ReportedRun], key: str) -> str:
    values = [run.tid_of(key) for run in ours if run.finished]
    known = [100 * value for value in values if value is not None]
    if not known:
        return NOTHING if ours else NOT_RUN
    return numerals.spread(spread(known), 2)


def _printed_of(published: Mapping[Kind, PaperStatistic | None], kind: Kind) -> str:
    return _printed(published[kind])


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
    return statistics if size is None else f"{statistics}, {size:,}"


NOT_RUN: Final = "not run"


def paper_table(comparison: Comparison) -> Table:
    """Return published results in the papers' order with ours, then the TID of the norms."""
    lines = [*_result_lines(comparison), *_tid_lines(comparison)]
    return Table.of(lines, ("norm", "placement", "paper", "measure", "paper's data"), wide="paper")


def _result_lines(comparison: Comparison) -> Iterator[dict[str, str]]:
    # Each measure has its own row; several papers may publish the same one.
    rows: dict[tuple[str, str, str, str], list[PaperRecord]] = {}
    for record in comparison.paper:
        key = record["norm"], record["placement"], record["dataset"], record["metric"]
        rows.setdefault(key, []).append(record)
    for (norm, placement, dataset, metric), records in rows.items():
        yield {
            "norm": norm,
            "placement": placement,
            "paper": "; ".join(printed_with_source(one, comparison.paper) for one in records),
            "measured": _measured(runs_of(comparison.runs, norm, placement), metric),
            "measure": heading_of(metric),
            "paper's data": dataset,
        }


def _tid_lines(comparison: Comparison) -> Iterator[dict[str, str]]:
    for one in comparison.paper_statistics:
        if one["metric"] in TID_HEADINGS:
            yield {
                "norm": one["norm"],
                "placement": one["placement"],
                "paper": f"{one['value']:.1f} ({one['source']})",
                "measured": _measured_tid(
                    runs_of(comparison.runs, one["norm"], one["placement"]), one["metric"]
                ),
                "measure": TID_HEADINGS[one["metric"]],
                "paper's data": one["dataset"],
            }


def printed_with_source(record: PaperRecord, beside: Iterable[PaperRecord]) -> str:
    """Format a published value with its source, see `_printed_value`."""
    return f"{_printed_value(record, beside)} ({record['source']})"


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
    value = spread(values_by_seed(ours, metric).values())
    if value is None:
        return numerals.mark(dict.fromkeys(run.shown_status for run in ours))
    lost = len(ours) - sum(run.finished for run in ours)
    seeds = f"{value.count} of {len(ours)}" if lost else str(value.count)
    return f"{numerals.spread(value)} ({seeds} {'seed' if len(ours) == 1 else 'seeds'})"
