"""Trials of all norms in rounds, and comparison of the best."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import optuna

from powernorm.errors import InputError
from powernorm.files import remove
from powernorm.records import CONFIG_FILE
from powernorm_lab.engine.coordination import Executor
from powernorm_lab.engine.events import Listener, Notice
from powernorm_lab.engine.executors.choice import Workers
from powernorm_lab.engine.folders import delete_run, find_runs, read_json, read_own_result
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.engine.leases import Lease, check_free
from powernorm_lab.engine.trials import TrialRules
from powernorm_lab.runs import (
    CHECKPOINTS_FOLDER,
    TRIALS_FOLDER,
    WORK_FILE,
    NormTuning,
    RunResult,
    TuningRecord,
)
from powernorm_lab.tuning import records
from powernorm_lab.tuning.norm_studies import (
    NUM_RANDOM,
    NormStudy,
    naming_storage,
    open_storage,
)
from powernorm_lab.tuning.ranges import Point, Space
from powernorm_lab.tuning.subjects import Subject

PRUNER: Final = (
    "median rule: a trial ends when its best value so far is worse than the median of the earlier "
    "trials of its norm at that step"
)
SEED: Final = 1000
"""Default seed of the trials, far from the usual seeds of comparisons."""


@dataclass(frozen=True)
class Budget:
    """Budget of every norm."""

    num_trials: int = 20
    seed: int | None = None
    """Seed of the trials; None means `SEED`, or the next one that the comparison does not use."""
    prunes: bool = True

    def __post_init__(self) -> None:
        if self.num_trials < 1:
            raise InputError(f"trials is {self.num_trials}: give at least 1 for every norm")
        if self.seed is not None and self.seed < 0:
            raise InputError(f"the seed of the trials is {self.seed}: give one from 0")

    def seed_beside(self, seeds: Sequence[int]) -> int:
        """Return the seed of the trials.

        Args:
            seeds: seeds of the final comparison.

        Raises:
            InputError: the comparison uses it, too.
        """
        if self.seed is None:
            return next(seed for seed in range(SEED, SEED + len(seeds) + 1) if seed not in seeds)
        if self.seed in seeds:
            raise InputError(
                f"the seed {self.seed} of the trials is one of the comparison's "
                f"({', '.join(map(str, seeds))}), to which the settings would be fitted: give "
                "another one"
            )
        return self.seed


class Tuning:
    """Trials of all norms in rounds, and comparison of the best."""

    def __init__(
        self,
        subject: Subject,
        out: Path,
        budget: Budget,
        spaces: Mapping[str, Space],
        workers: Workers,
        listener: Listener,
    ) -> None:
        self._subject = subject
        self._out = out
        self._trials = out / TRIALS_FOLDER
        self._budget = budget
        self._seed = budget.seed_beside(subject.seeds)
        self._goal = subject.select_by
        self._spaces = spaces
        self._workers = workers
        self._listener = listener
        self._studies: list[NormStudy] = []
        self._results: dict[str, RunResult] = {}
        self._round_size = max(1, -(-workers.jobs // len(spaces)))
        """Trials per norm in a round, enough to keep the workers busy."""
        self._compared: dict[str, int] = {}
        """Number of the trial whose settings the comparison uses, by norm."""
        identity = {
            **subject.identity,
            "select_by": self._goal,
            "tuning_seed": self._seed,
            "prune": budget.prunes,
            "search": {n: {k: one.text for k, one in s.items()} for n, s in spaces.items()},
        }
        # JSON converts tuples to lists, as in the file.
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))

    @contextmanager
    def holding(self, *, resume: bool, force: bool) -> Iterator[None]:
        """Hold the folder's lease, and start or resume the tuning."""
        check_free(self._out)
        lease = Lease(self._out)
        try:
            self._begin(resume=resume, force=force)
            yield
        finally:
            lease.release(forget=True)

    def _begin(self, *, resume: bool, force: bool) -> None:
        """Start or resume the tuning in the folder."""
        old = records.take_folder(self._out, self._identity, resume=resume, force=force)
        known: dict[str, int] = {}
        if old is not None:
            self._round_size = old.round_size
            self._compared = old.compared
            known = {norm: len(one["curve"]) for norm, one in old.norms.items()}
            most = max(known.values(), default=0)
            if most > self._budget.num_trials:
                raise InputError(
                    f"{self._out} has {most} trials of a norm already: give --trials {most} or "
                    "more, or another --out"
                )
        self._read_own_results()
        with naming_storage(self._out):
            storage = open_storage(self._out)
            self._studies = [
                NormStudy(
                    storage,
                    norm,
                    self._goal,
                    space,
                    self._subject.untuned(norm, space),
                    self._seed,
                )
                for norm, space in self._spaces.items()
            ]
            for study in self._studies:
                if len(study.trials()) < known.get(study.norm, 0):
                    raise ValueError(f"it lacks trials of {study.norm}")
            self._write()

    def search(self) -> None:
        """Train all trials.

        Raises:
            InputError: every trial of the first round failed.
        """
        executor: Executor | None = None
        with ExitStack() as started:
            while asked := [
                trial
                for study in self._studies
                for trial in study.next_round(self._round_size, self._budget.num_trials)
            ]:
                grid = self._grid(asked)
                if executor is None:  # started with the first grid
                    executor = started.enter_context(self._executor(self._trials, grid))
                self._train(grid, asked, executor)
        # Its contents depend on where a tuning was interrupted.
        remove(self._trials / WORK_FILE)

    @contextmanager
    def _executor(self, out: Path, grid: Grid) -> Iterator[Executor | None]:
        """Yield an executor of workers for a folder; None if this process trains."""
        if not self._workers.are_used:
            yield None
            return
        executor = self._workers.start_executor(out, grid)
        try:
            yield executor
        finally:
            executor.close()

    def _grid(self, asked: Sequence[Point]) -> Grid:
        """Return the grid of a round."""
        limits = {study.norm: study.limits() for study in self._studies}
        rules = TrialRules(self._goal, limits if self._budget.prunes else {})
        known = [point for study in self._studies for point in study.points()]
        return self._subject.trials(asked, known, self._seed, rules)

    def _train(self, grid: Grid, asked: Sequence[Point], executor: Executor | None) -> None:
        is_first = not self._trials.exists()
        compare_grid(
            grid,
            self._trials,
            resume=True,
            on_event=self._listener,
            announces=is_first,
            executor=executor,
        )
        self._read_own_results()
        self._check_that_some_train(asked)
        for one in asked:
            study = next(study for study in self._studies if study.norm == one.norm)
            folder = self._folder(one)
            result = self._results[folder.name]
            value = result.metrics.get(self._goal["metric"])
            history = records.history(folder, self._subject.column)
            assert one.number is not None
            study.tell(one.number, result.status, value, history)
            remove(folder / CHECKPOINTS_FOLDER)  # logs and results are kept
        self._write()
        self._listener(Notice(self._progress()))

    def _read_own_results(self) -> None:
        found = ((folder.name, read_own_result(folder)) for folder in find_runs(self._trials))
        self._results = {name: result for name, result in found if result is not None}

    def _check_that_some_train(self, asked: Sequence[Point]) -> None:
        """Raise an InputError if all trials of the first round failed, as the others would."""
        failed = [one for one in self._results.values() if one.status == "failed"]
        if len(failed) == len(self._results) == len(asked):
            raise InputError(
                f"every trial failed, the first one by {failed[0].message or 'an error'}: "
                f"correct it, then restart with --force (see {self._trials})"
            )

    def _progress(self) -> str:
        done = min(len(study.curve()) for study in self._studies)
        best = [
            f"{study.norm} {found.value:.5g} (trial {found.number})"
            for study in self._studies
            if (found := study.best()) is not None
        ]
        name = self._goal["metric"].replace("_", " ")
        return (
            f"{done} of {self._budget.num_trials} trials of each norm are done; best {name}: "
            f"{', '.join(best) or 'none yet'}"
        )

    def compare(self) -> None:
        """Train the best settings of every norm with the seeds of the comparison.

        Raises:
            InputError: a norm has no completed trial.
        """
        chosen = {study.norm: study.best() for study in self._studies}
        points = []
        for norm, best in chosen.items():
            if best is None:
                raise InputError(
                    f"no trial of {norm} was completed (see {self._out / 'trials.csv'}): give more "
                    "--trials with --resume, other ranges, or leave it out"
                )
            points.append(Point(norm, dict(best.params)))
        grid = self._subject.comparison(points)
        self._forget_others({norm: best.number for norm, best in chosen.items() if best})
        record = self._record()
        head = grid.head
        grid = replace(grid, head=lambda: {**head(), "tuning": record})
        with self._executor(self._out, grid) as executor:
            compare_grid(grid, self._out, resume=True, on_event=self._listener, executor=executor)

    def _forget_others(self, chosen: dict[str, int]) -> None:
        """Delete runs of the comparison whose settings are no longer the best."""
        changed = [
            norm for norm, number in chosen.items() if self._compared.get(norm, number) != number
        ]
        for folder in find_runs(self._out):
            if read_json(folder / CONFIG_FILE).get("norm") in changed:
                delete_run(folder)
                self._listener(
                    Notice(f"retraining {folder.name}: more trials found better settings")
                )
        self._compared |= chosen
        self._write()

    # What is known, for the files

    def _write(self) -> None:
        records.write_record(
            self._out,
            self._record(),
            self._identity,
            round_size=self._round_size,
            compared=self._compared,
        )
        rows = []
        for study in self._studies:
            for trial in study.points():
                folder = self._folder(trial)
                found = self._results.get(folder.name)
                row = records.trial_row(found, folder, trial, self._goal["metric"])
                rows.append({**row, **trial.values})
        keys = dict.fromkeys(key for space in self._spaces.values() for key in space)
        records.write_trials(self._out, rows, list(keys))

    def _folder(self, trial: Point) -> Path:
        """Return the folder of a trial, whose name is incomplete before it has a result."""
        start = f"{trial.label}-"
        name = next((name for name in self._results if name.startswith(start)), start)
        return self._trials / name

    def _record(self) -> TuningRecord:
        return TuningRecord(
            num_trials=self._budget.num_trials,
            select_by=self._goal,
            seed=self._seed,
            sampler=f"TPE of Optuna {optuna.__version__}, {NUM_RANDOM} trials without it first",
            pruner=PRUNER if self._budget.prunes else None,
            norms={study.norm: self._norm_record(study) for study in self._studies},
        )

    def _norm_record(self, study: NormStudy) -> NormTuning:
        results = [self._results.get(self._folder(trial).name) for trial in study.points()]
        statuses: Counter[str] = Counter(
            "unfinished" if one is None else one.status for one in results
        )
        best, curve = study.best(), study.curve()
        return NormTuning(
            search={key: one.text for key, one in study.space.items()},
            trials=dict(statuses),
            untuned=curve[0] if curve else None,
            best=None
            if best is None or best.value is None
            else {"trial": best.number, "value": best.value, "settings": dict(best.params)},
            curve=curve,
            importance=study.importance(),
        )
