"""A comparison as the report sees it: plain values read from the run folders."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import Final, Literal

from pandas import DataFrame

from powernorm.records import NORMS_COLUMNS, DiagnosisRecord, ScaleRecord
from powernorm_lab.report.measures import MAIN, MEASURES, PERPLEXITY, Measure, goal_of, own_measure
from powernorm_lab.runs import (
    LOST,
    METRICS_COLUMNS,
    ComparisonResults,
    RunResult,
    Status,
    placement_words,
)

UNPLACED: Final = ("image", "parse")
"""Tasks whose norms stand before the activation, with no residual sum to stand before or after."""

Behind = Literal["worse than a baseline"]
BEHIND: Final[Behind] = "worse than a baseline"
"""A run that came to its end, and is no better than the first model without a network."""
ShownStatus = Status | Behind


Translation = tuple[str, str, str]
"""One line of `translations.tsv`: source, reference and translation."""

_NO_STEPS: Final = partial(DataFrame, columns=METRICS_COLUMNS, dtype=float)
_NO_SAMPLES: Final = partial(DataFrame, columns=NORMS_COLUMNS, dtype=float)


@dataclass(frozen=True, kw_only=True)
class ReportedRun(RunResult):
    """One run: its result as far as there is one, and its logged rows."""

    curve: DataFrame = field(default_factory=_NO_STEPS, repr=False, compare=False)
    """`metrics.csv`, see `powernorm_lab.report.loading.read_metrics`."""
    samples: DataFrame = field(default_factory=_NO_SAMPLES, repr=False, compare=False)
    """`norms.csv`: a row a layer and monitored step."""
    diagnosis: DiagnosisRecord | None = None
    diagnoses: Sequence[DiagnosisRecord] = ()
    """Those that were made while it trained, by step."""
    scales: Sequence[ScaleRecord] = ()
    is_behind: bool = False
    """Whether it is called diverged, and is only worse than the first baseline."""

    @property
    def shown_status(self) -> ShownStatus:
        """The status, where a "finished" run with a metric that is no number is not one."""
        if self.is_behind:
            return BEHIND
        numbers = (value for value in self.metrics.values() if value is not None)
        if self.status == "finished" and not all(isfinite(value) for value in numbers):
            return "nonfinite"
        return self.status

    @property
    def finished(self) -> bool:
        """Whether its numbers may enter an average."""
        return self.shown_status == "finished"

    @property
    def broke_down(self) -> bool:
        """Whether it ended for a reason of its own: not stopped by the user, not still going."""
        return self.shown_status in {*LOST, "failed", BEHIND}

    @property
    def is_as_expected(self) -> bool:
        """Whether it finished, or a race had no more need of it."""
        return self.shown_status in ("finished", "dropped")

    @property
    def nonfinite_batches(self) -> int | None:
        """Batches whose statistics were not finite, in the layer that met most of them."""
        counts = self.samples["num_nonfinite_batches"].dropna()
        return int(counts.max()) if len(counts) else None

    @property
    def first_nonfinite(self) -> tuple[str, int] | None:
        """Where a number that is not finite was seen first: layer and step."""
        found = self.samples[self.samples["first_nonfinite"].fillna(0) != 0]
        return None if found.empty else (found["layer"].iloc[0], int(found["step"].iloc[0]))


@dataclass(frozen=True, kw_only=True)
class Comparison(ComparisonResults):
    """All runs of a comparison folder with the settings that they share."""

    folder: Path
    """Where it lies."""
    runs: Sequence[ReportedRun]
    """In the order in which they were trained."""
    anchor: str = ""
    """In front of every id, where the comparison shares a page with others."""
    settings_of: str = ""
    """Folder of the run whose configuration `settings` is; empty where they are those of the
    comparison."""

    @property
    def where(self) -> str:
        """Where the norms stand, in a word; empty where a model has one place for them only."""
        if not self.placement or self.task in UNPLACED:
            return ""
        return placement_words(self.placement)

    @property
    def metric(self) -> str:
        """The metric that the comparison is about."""
        return self.goal["metric"]

    @property
    def has_known_measure(self) -> bool:
        """Whether a built-in task is about the measure that it is known for.

        Else nothing is said of the metrics but what their names and the goal say.
        """
        return (
            self.function is None
            and self.metric in (PERPLEXITY, *MAIN)
            and self.goal == goal_of(self.metric)
        )

    @cached_property
    def measure(self) -> Measure:
        """What the comparison is about."""
        if self.has_known_measure:
            return MEASURES[self.metric]
        values = (run.metrics.get(self.metric) for run in self.runs if run.finished)
        return own_measure(self.goal, [value for value in values if value is not None])

    @cached_property
    def score_measure(self) -> Measure:
        """What `valid_score` is, by the measure of the test split that it has the name of.

        Older files do not say it: then it is what the task is about beside the likelihood.
        """
        if self.score is not None:
            metric = self.score["metric"].replace("valid_", "test_", 1)
            return MEASURES.get(metric) or own_measure(self.score)
        known = [MEASURES[name] for name in MAIN if name in (self.metric, *self.other_metrics)]
        return known[0] if known else self.measure

    @cached_property
    def other_metrics(self) -> list[str]:
        """The other metrics that its runs have, each once, in their order."""
        found = dict.fromkeys(metric for run in self.runs for metric in run.metrics)
        return [metric for metric in found if metric != self.metric]

    @property
    def names(self) -> list[str]:
        """Short names of the norms, or labels, each once, in the order of the runs."""
        return list(dict.fromkeys(run.name for run in self.runs))


def runs_of(runs: Iterable[ReportedRun], name: str, placement: str) -> list[ReportedRun]:
    """Return the runs of a norm, or label, with its norms placed so."""
    return [run for run in runs if (run.name, run.placement) == (name, placement)]
