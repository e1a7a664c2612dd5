"""The grid of a comparison: its lines, which become rows of the table, and its seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from powernorm.errors import InputError
from powernorm_lab.engine.line import Line
from powernorm_lab.engine.tasks import Task
from powernorm_lab.engine.trials import TrialRules
from powernorm_lab.runs import Goal, RaceSettings, StudyInfo


@dataclass(frozen=True)
class Race:
    """Drop norms that are significantly worse, and stop when the best is known (`engine/race.py`).

    Raises:
        InputError: a value is out of range.
    """

    confidence: float = 0.95
    """Probability with which the best norm is never dropped, for any number of seeds."""
    margin: float | None = None
    """Largest difference that does not matter, in the unit of the race's metric: the race ends when
    all remaining norms are this close with the same confidence. None: no such end."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise InputError(
                f"a race with confidence {self.confidence:g}: give a value from 0.5 to below 1, "
                "such as 0.95"
            )
        if self.margin is not None and not 0 < self.margin < float("inf"):
            raise InputError(
                f"a race with margin {self.margin:g}: give the smallest difference that matters, "
                "a number above 0"
            )

    def record(self) -> RaceSettings:
        """Return the settings for the files."""
        return RaceSettings(confidence=self.confidence, margin=self.margin)


@dataclass(frozen=True)
class Grid:
    """All runs of a comparison, and the functions that describe them in files."""

    task: Task
    lines: Sequence[Line]
    seeds: Sequence[int]
    goal: Goal
    """The metric that ranks the norms."""
    settings: Any
    """Settings of all runs, for the task's `prepare`."""
    head: Callable[[], Mapping[str, Any]]
    """Returns the comparison's fields of results.json; called in the first process."""
    config: Callable[[Line, int, str | None], Mapping[str, Any]]
    """Returns config.json for a line, a seed and the data's fingerprint."""
    line_of: Callable[[Path, Mapping[str, Any]], Line]
    """Returns the line of a run of an earlier call, from its folder and config.json."""
    device: torch.device
    num_threads: int | None = None
    """CPU threads of torch; None is torch's default."""
    study: StudyInfo | None = None
    """The study's record in each run's result, in case results.json is lost."""
    race: Race | None = None
    """None trains every norm with every seed."""
    trial: TrialRules | None = None
    """Rules by which trials of a tuning are stopped early; None outside of a tuning."""
    score: str | None = None
    """Meaning of `valid_score` in metrics.csv, such as `accuracy`."""
    log_to: Sequence[str] = ()
    """Names of `engine.trackers.TRACKERS` that receive all logged numbers."""

    def work_record(self) -> dict[str, Any]:
        """Return the contents of work.json, from which workers build the grid.

        Raises:
            InputError: a worker cannot import the training function.
        """
        rules: dict[str, Any] = {} if self.trial is None else {"trial": self.trial.to_json()}
        if self.race is not None:
            rules["race"] = self.race.record()
        return {
            "format": 1,
            **self.task.work(self),
            **rules,
            "log_to": list(self.log_to),
        }

    def runs(self) -> Iterator[tuple[Line, int]]:
        """Yield the runs in the order of training: all lines of a seed before the next seed."""
        for seed in self.seeds:
            for line in self.lines:
                yield line, seed
