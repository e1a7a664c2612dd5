"""Values of a study's variants for its figures: mean and extremes over seeds, lost runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Final

from pandas import DataFrame

from powernorm_lab.report.figures import perplexity_label, runs_by_name
from powernorm_lab.report.measures import PERPLEXITY
from powernorm_lab.report.numerals import STATUS_WORDS
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.summary import mean

Measure = Callable[[ReportedRun], float | None]
"""Function from a run to a quantity, or None."""


_NUMBERS: Final = ("x", "y", "mean", "low", "high")


def points_of(comparison: Comparison, measure: Measure, missing: str = "") -> DataFrame:
    """Return a row for each variant, by label and in the order of the runs.

    Args:
        comparison: comparison with the runs.
        measure: the quantity.
        missing: note on a finished run without the quantity; empty to ignore it.

    Returns:
        `norm`; `x` and `y` on the study's axes; `mean`, `low` and `high` over finished runs, NaN
        without any that have the quantity; `lost`, the statuses of the other runs.
    """
    rows = {}
    for name, runs in runs_by_name(comparison.runs).items():
        lost = [STATUS_WORDS[run.shown_status] for run in runs if not run.finished]
        found = [measure(run) for run in runs if run.finished]
        lost += [missing] if missing and None in found else []
        known = [value for value in found if value is not None and isfinite(value)]
        # A run without a result has no position, but other seeds may have one.
        placed = next((run for run in runs if run.x is not None), runs[0])
        ends = (mean(known), min(known), max(known)) if known else (nan, nan, nan)
        rows[name] = [placed.norm, "/".join(dict.fromkeys(lost)), placed.x, placed.y, *ends]
    table = DataFrame.from_dict(rows, orient="index", columns=["norm", "lost", *_NUMBERS])
    return table.astype(dict.fromkeys(_NUMBERS, float))


@dataclass(frozen=True)
class StudyQuantity:
    """A quantity of variants in a figure.

    Attributes:
        key: name in the ids of an SVG.
        title: description for titles.
        unit: unit of an axis.
        measure: function from a run to the quantity.
        higher_is_better: whether it is a score, not a loss.
        decimals: decimals of a number in a cell; None depends on the magnitude.
    """

    key: str
    title: str
    unit: str
    measure: Measure
    higher_is_better: bool = False
    decimals: int | None = None

    @property
    def direction(self) -> str:
        """Better direction in words."""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"


def main_score(comparison: Comparison) -> StudyQuantity:
    """Return the main measure of a comparison, such as perplexity, BLEU or accuracy."""
    measure = comparison.measure
    name = measure.heading.removeprefix("test ")
    return StudyQuantity(
        "test",
        f"Test {name}",
        _unit(comparison, name),
        metric(measure.metric),
        measure.higher_is_better,
        measure.decimals if measure.decimals > 2 else None,
    )


def validation_score(comparison: Comparison) -> StudyQuantity:
    """Return the main measure on the validation data, else the validation loss."""
    name = comparison.metric.replace("test_", "valid_", 1)
    if not any(name in run.metrics for run in comparison.runs):
        return VALID_LOSS
    test = main_score(comparison)
    title = test.title.replace("Test", "Validation", 1)
    return replace(test, key="valid", title=title, measure=metric(name))


def _unit(comparison: Comparison, name: str) -> str:
    if comparison.metric == PERPLEXITY:
        return perplexity_label(comparison)
    return f"{name}, %" if comparison.metric in _PERCENTS else name


_PERCENTS: Final = ("test_accuracy", "test_f1", "test_uas")


def metric(name: str) -> Measure:
    """Return the measure of a metric of the result."""
    return lambda run: run.metrics.get(name)


def tid_percent(key: str) -> Measure:
    """Return the measure of a TID in percent, by a key of `powernorm.records.TID`."""

    def measure(run: ReportedRun) -> float | None:
        value = None if run.tid is None else dict[str, float | None](**run.tid).get(key)
        return None if value is None else 100 * value

    return measure


NATS: Final = "nats per target"
VALID_LOSS: Final = StudyQuantity(
    "valid", "Validation loss", NATS, metric("valid_loss"), decimals=3
)
