"""What a comparison trains: its lines, which become rows of the table, and its seeds."""

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
    """Drop norms that are behind, and stop when it is decided; `engine/race.py` says how.

    Raises:
        InputError: a value makes no sense.
    """

    confidence: float = 0.95
    """With which the best norm is not dropped, however many seeds there are."""
    margin: float | None = None
    """Differences below it, in the unit of the metric that decides, do not matter: where all norms
    that are left are so close with the same confidence, the race is over. None: it goes on."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise InputError(
                f"a race with confidence {self.confidence:g}: give a share from 0.5 to below 1, "
                "such as 0.95"
            )
        if self.margin is not None and not 0 < self.margin < float("inf"):
            raise InputError(
                f"a race with margin {self.margin:g}: give the smallest difference that matters, "
                "a number above 0"
            )

    def record(self) -> RaceSettings:
        """Return it for the files."""
        return RaceSettings(confidence=self.confidence, margin=self.margin)


@dataclass(frozen=True)
class Grid:
    """Everything that is trained, and how the files speak of it."""

    task: Task
    lines: Sequence[Line]
    seeds: Sequence[int]
    goal: Goal
    """The metric that the comparison is about."""
    settings: Any
    """Of all runs, for the task's `prepare`."""
    head: Callable[[], Mapping[str, Any]]
    """What results.json says of the comparison; called in the first process."""
    config: Callable[[Line, int, str | None], Mapping[str, Any]]
    """config.json of a line, a seed and the data's fingerprint."""
    line_of: Callable[[Path, Mapping[str, Any]], Line]
    """Line of a run of an earlier call, from its folder and config.json."""
    device: torch.device
    num_threads: int | None = None
    """CPU threads of torch; None leaves torch its choice."""
    study: StudyInfo | None = None
    """What a run's own result says of the study, should results.json be lost."""
    race: Race | None = None
    """None trains every norm with every seed."""
    trial: TrialRules | None = None
    """How the runs are judged where they are trials of a tuning."""
    score: str | None = None
    """Meaning of `valid_score` in metrics.csv, such as `accuracy`."""
    log_to: Sequence[str] = ()
    """Names of `engine.trackers.TRACKERS` that show every number of a run, too."""

    def work_record(self) -> dict[str, Any]:
        """Return what a worker has to know of the comparison, for the file that it reads.

        Raises:
            InputError: it cannot import the function.
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
