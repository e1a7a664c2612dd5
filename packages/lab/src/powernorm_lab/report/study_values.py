"""What a study's figure shows of each variant: the mean over seeds, the extremes, lost runs."""

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
"""A quantity of a run; None where it has none."""


_NUMBERS: Final = ("x", "y", "mean", "low", "high")


def points_of(comparison: Comparison, measure: Measure, missing: str = "") -> DataFrame:
    """Return a row a variant by its label, in the order of the runs.

    Args:
        comparison: has the runs.
        measure: the quantity.
        missing: what to say of a finished run that lacks it; empty where that is no loss.

    Returns:
        `norm`; `x` and `y` on the study's axes; `mean`, `low` and `high` over the runs that
        finished, NaN where none did, or none has the quantity; `lost`, what became of the others.
    """
    rows = {}
    for name, runs in runs_by_name(comparison.runs).items():
        lost = [STATUS_WORDS[run.shown_status] for run in runs if not run.finished]
        found = [measure(run) for run in runs if run.finished]
        lost += [missing] if missing and None in found else []
        known = [value for value in found if value is not None and isfinite(value)]
        # A run without a result does not know its place; its seeds may.
        placed = next((run for run in runs if run.x is not None), runs[0])
        ends = (mean(known), min(known), max(known)) if known else (nan, nan, nan)
        rows[name] = [placed.norm, "/".join(dict.fromkeys(lost)), placed.x, placed.y, *ends]
    table = DataFrame.from_dict(rows, orient="index", columns=["norm", "lost", *_NUMBERS])
    return table.astype(dict.fromkeys(_NUMBERS, float))


@dataclass(frozen=True)
class StudyQuantity:
    """What a figure shows of each variant.

    Attributes:
        key: its name in the ids of an SVG.
        title: what it is, in words.
        unit: on an axis.
        measure: of a run.
        higher_is_better: whether it is a score, not a loss.
        decimals: of a number in a cell; None goes by its size.
    """

    key: str
    title: str
    unit: str
    measure: Measure
    higher_is_better: bool = False
    decimals: int | None = None

    @property
    def direction(self) -> str:
        """Which way is better, in words."""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"


def main_score(comparison: Comparison) -> StudyQuantity:
    """The measure that the comparison is about, such as perplexity, BLEU or accuracy."""
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
    """The same of the validation data; the loss there, where nothing else was measured."""
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
    """A metric of the result."""
    return lambda run: run.metrics.get(name)


def tid_percent(key: str) -> Measure:
    """A TID of the result in percent, by the keys of `powernorm.records.TID`."""

    def measure(run: ReportedRun) -> float | None:
        value = None if run.tid is None else dict[str, float | None](**run.tid).get(key)
        return None if value is None else 100 * value

    return measure


NATS: Final = "nats per target"
VALID_LOSS: Final = StudyQuantity(
    "valid", "Validation loss", NATS, metric("valid_loss"), decimals=3
)
