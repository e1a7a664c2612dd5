"""Comparisons for the report: plain values read from run folders."""

from collections.abc import Iterable, Mapping, Sequence
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
"""Tasks without a placement, because their norms are before the activation and not at residual
sums."""

Behind = Literal["worse than a baseline"]
BEHIND: Final[Behind] = "worse than a baseline"
"""Status of a completed run that is no better than the first model without a network."""
ShownStatus = Status | Behind


STATUS_WORDS: Final[Mapping[ShownStatus, str]] = {
    "finished": "finished",
    "diverged": "diverged",
    BEHIND: BEHIND,
    "nonfinite": "NaN",
    "interrupted": "interrupted",
    "failed": "failed",
    "dropped": "dropped",
    "pruned": "given up",
    "unfinished": "unfinished",
}

Translation = tuple[str, str, str]
"""One line of `translations.tsv`: source, reference and translation."""

_NO_STEPS: Final = partial(DataFrame, columns=METRICS_COLUMNS, dtype=float)
_NO_SAMPLES: Final = partial(DataFrame, columns=NORMS_COLUMNS, dtype=float)


@dataclass(frozen=True, kw_only=True)
class ReportedRun(RunResult):
    """A run with its result, if any, and its logs."""

    curve: DataFrame = field(default_factory=_NO_STEPS, repr=False, compare=False)
    """`metrics.csv`, see `powernorm_lab.report.loading.read_metrics`."""
    samples: DataFrame = field(default_factory=_NO_SAMPLES, repr=False, compare=False)
    """`norms.csv`, with one row per layer and monitored step."""
    diagnosis: DiagnosisRecord | None = None
    diagnoses: Sequence[DiagnosisRecord] = ()
    """Diagnoses made during training, by step."""
    scales: Sequence[ScaleRecord] = ()
    is_behind: bool = False
    """Whether its status is diverged only because it is worse than the first baseline."""

    @property
    def shown_status(self) -> ShownStatus:
        """Status in the report; a "finished" run with a non-finite metric is "nonfinite"."""
        if self.is_behind:
            return BEHIND
        numbers = (value for value in self.metrics.values() if value is not None)
        if self.status == "finished" and not all(isfinite(value) for value in numbers):
            return "nonfinite"
        return self.status

    @property
    def status_words(self) -> str:
        """Status in words."""
        return STATUS_WORDS[self.shown_status]

    @property
    def finished(self) -> bool:
        """Whether its numbers may enter an average."""
        return self.shown_status == "finished"

    @property
    def broke_down(self) -> bool:
        """Whether it ended by itself without finishing: neither stopped nor in progress."""
        return self.shown_status in {*LOST, "failed", BEHIND}

    @property
    def is_as_expected(self) -> bool:
        """Whether it finished, or a race did not need it."""
        return self.shown_status in ("finished", "dropped")

    def tid_of(self, key: str) -> float | None:
        """Return a TID by its key; None without one."""
        # A TypedDict takes literal keys only.
        return None if self.tid is None else {**self.tid}[key]  # type: ignore[return-value]

    @property
    def nonfinite_batches(self) -> int | None:
        """Largest number over layers of batches with non-finite statistics."""
        counts = self.samples["num_nonfinite_batches"].dropna()
        return int(counts.max()) if len(counts) else None

    @property
    def first_nonfinite(self) -> tuple[str, int] | None:
        """Layer and step of the first non-finite number."""
        found = self.samples[self.samples["first_nonfinite"].fillna(0) != 0]
        return None if found.empty else (found["layer"].iloc[0], int(found["step"].iloc[0]))


@dataclass(frozen=True, kw_only=True)
class Comparison(ComparisonResults):
    """All runs of a comparison folder with their shared settings."""

    folder: Path
    """Folder of the comparison."""
    runs: Sequence[ReportedRun]
    """Runs in the order of their training."""
    anchor: str = ""
    """Prefix of every id, if a page has several comparisons."""
    settings_of: str = ""
    """Folder of the run that `settings` belongs to; empty for settings of the comparison."""

    @property
    def where(self) -> str:
        """Placement of the norms in words; empty for models with only one placement."""
        if not self.placement or self.task in UNPLACED:
            return ""
        return placement_words(self.placement)

    @property
    def metric(self) -> str:
        """Main metric of the comparison."""
        return self.goal["metric"]

    @property
    def has_known_measure(self) -> bool:
        """Whether the goal is the main measure of a built-in task.

        Otherwise only the names of metrics and the goal are known.
        """
        return (
            self.function is None
            and self.metric in (PERPLEXITY, *MAIN)
            and self.goal == goal_of(self.metric)
        )

    @cached_property
    def measure(self) -> Measure:
        """Main measure of the comparison."""
        if self.has_known_measure:
            return MEASURES[self.metric]
        values = (run.metrics.get(self.metric) for run in self.runs if run.finished)
        return own_measure(self.goal, [value for value in values if value is not None])

    @cached_property
    def score_measure(self) -> Measure:
        """Measure of `valid_score`, which is named after that of the test split.

        Older files do not name it; then it is the task's main measure other than the likelihood.
        """
        if self.score is not None:
            metric = self.score["metric"].replace("valid_", "test_", 1)
            return MEASURES.get(metric) or own_measure(self.score)
        known = [MEASURES[name] for name in MAIN if name in (self.metric, *self.other_metrics)]
        return known[0] if known else self.measure

    @cached_property
    def other_metrics(self) -> list[str]:
        """Distinct other metrics of its runs, in order of appearance."""
        found = dict.fromkeys(metric for run in self.runs for metric in run.metrics)
        return [metric for metric in found if metric != self.metric]

    @property
    def names(self) -> list[str]:
        """Distinct short names or labels, in the order of the runs."""
        return list(dict.fromkeys(run.name for run in self.runs))


def runs_of(runs: Iterable[ReportedRun], name: str, placement: str) -> list[ReportedRun]:
    """Return the runs of a norm or label with a placement."""
    return [run for run in runs if (run.name, run.placement) == (name, placement)]
