"""Training of a comparison's grid: every norm with every seed, here or by workers."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from powernorm.errors import InputError
from powernorm.records import CONFIG_FILE
from powernorm_lab.engine.comparison_results import Results
from powernorm_lab.engine.coordination import Executor, coordinate
from powernorm_lab.engine.events import Listener, Notice, RunEnded, ignore
from powernorm_lab.engine.folders import (
    check_folder,
    check_place,
    check_same_settings,
    find_runs,
    prepare_folder,
    read_json,
    write_json,
)
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.isolation import own_generators, threads
from powernorm_lab.engine.leases import Lease, LeaseHeldError, LeaseLostError, check_free
from powernorm_lab.engine.line import Line
from powernorm_lab.engine.processes import (
    are_several,
    is_main,
    locally_first,
    num_processes,
    on_main,
    process_group,
)
from powernorm_lab.engine.race import Standing, check_race, standing
from powernorm_lab.engine.run_training import RunTraining, remove_leftovers
from powernorm_lab.engine.stopping import Stop
from powernorm_lab.engine.trackers import check_trackers
from powernorm_lab.runs import (
    COMPARISON_FILE,
    WORK_FILE,
    ComparisonHead,
    ComparisonResults,
    FunctionRecord,
    RunResult,
)
from powernorm_lab.schema import written

POLL_SECONDS: Final = 2.0
"""Seconds between two checks of the runs that other processes train."""


def compare_grid(
    grid: Grid,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    on_event: Listener | None = None,
    announces: bool = True,
    executor: Executor | None = None,
    plan_only: bool = False,
) -> ComparisonResults:
    """Train every line with every seed, and write the runs and their results.

    Args:
        grid: what to train.
        out: folder of the comparison.
        resume: keep runs that are over, and resume the others.
        force: delete the runs in `out` first.
        on_event: is called with every event, in the first process.
        announces: send the event that describes the data.
        executor: starts the workers that train; None trains here, one run after the other.
        plan_only: write the files that workers need, and train nothing.

    Returns:
        The contents of `results.json`.

    Raises:
        InputError: an argument is invalid, or another process trains in `out`.
        KeyboardInterrupt: after the current run has been marked as interrupted.
        Stopped: the same after SIGTERM or SIGUSR1.
    """
    check_race(grid)
    check_trackers(grid.log_to)
    if executor is not None and are_several():
        raise InputError(
            "the processes of torchrun train each run together and cannot start workers: leave out "
            "--jobs and --executor, or use --devices instead of torchrun"
        )
    try:
        work: dict[str, Any] | None = grid.work_record()
    except InputError:  # a function of a prompt or a notebook, which no worker can import
        if plan_only or executor is not None:
            raise
        work = None
    out = out.absolute()  # a training function may change the working directory
    stop = Stop()
    with stop.watching(), process_group(grid.device.type):
        lease = _on_main_only(lambda: _take_folder(out, resume=resume, force=force))
        try:
            data = locally_first(lambda: grid.task.prepare(grid.settings))
            # Old runs are deleted only now, when the data are known to be valid.
            on_main(lambda: prepare_folder(out, resume=resume, force=force))
            listener = (on_event or ignore) if is_main() else ignore
            comparison = _Comparison(grid, out, data, lease, stop, listener)
            with own_generators(), threads(grid.num_threads):
                comparison.begin(work, announces=announces)
                if plan_only:
                    pass
                elif executor is None:
                    comparison.train(resume=resume)
                else:
                    comparison.hand_over(executor)
            return on_main(comparison.write_results)
        finally:
            if lease is not None:
                lease.release(forget=True)


def _on_main_only(function: Callable[[], Lease]) -> Lease | None:
    """Call a function in the first process; an InputError is raised in all."""
    kept: list[Lease] = []
    on_main(lambda: kept.append(function()))
    return kept[0] if kept else None


def _take_folder(out: Path, *, resume: bool, force: bool) -> Lease:
    """Lease a comparison's folder, or refuse it."""
    check_free(out)
    check_folder(out, resume=resume, force=force)
    lease = Lease(out)
    try:
        # Another process may have written into the folder in between.
        check_folder(out, resume=resume, force=force)
    except BaseException:
        lease.release(forget=True)
        raise
    return lease


class _Comparison:
    """One call of `compare_grid`: its runs and their results."""

    def __init__(
        self,
        grid: Grid,
        out: Path,
        data: Any,
        lease: Lease | None,
        stop: Stop,
        listener: Listener,
    ) -> None:
        self._grid = grid
        self._out = out
        self._data = data
        self._lease = lease
        self._stop = stop
        self._listener = listener
        self._source = grid.task.source()
        self._results = Results(grid, out)
        # In the first process only, since it soon writes into these folders.
        on_main(self._check_old_runs)
        self._baselines = on_main(lambda: grid.task.baselines(data, grid.settings))

    def begin(self, work: Mapping[str, Any] | None, *, announces: bool) -> None:
        """Announce the data, and write the files that are known before the first run."""
        if announces:
            self._grid.task.announce(self._data, self._baselines, self._listener)
        self._head = on_main(self._write_head)
        if work is not None and is_main():
            write_json(self._out / WORK_FILE, work)
        self._keep_results()

    def train(self, *, resume: bool) -> None:
        """Train the unfinished runs in this process."""
        training = RunTraining(
            self._results,
            self._data,
            self._baselines,
            self._stop,
            self._listener,
            self._keep_results,
            resume=resume,
        )
        train_free_runs(training, self._stop, self._listener)

    def hand_over(self, executor: Executor) -> None:
        """Let workers train the unfinished runs."""
        assert self._lease is not None
        coordinate(self._results, executor, self._stop, self._listener, self.write_results)

    def _check_old_runs(self) -> None:
        """Check the settings of existing runs and the folders of all runs, before any training."""
        for line, run_seed in self._grid.runs():
            check_place(self._out / line.folder(run_seed))
        fingerprint = self._grid.task.fingerprint(self._data)
        changed: FunctionRecord | None = None
        for folder in find_runs(self._out):
            old = read_json(folder / CONFIG_FILE)
            changed = self._changed_source(old) or changed
            seed = old.get("seed")
            line = self._grid.line_of(folder, old)
            new = self._grid.config(line, seed if isinstance(seed, int) else 0, fingerprint)
            check_same_settings(folder, old, new)
        if changed is not None:
            self._listener(
                Notice(
                    f"{changed['file'] or changed['name']} has changed since runs in {self._out} "
                    "were trained: older and newer runs may not be comparable; --force starts over"
                )
            )
        remove_leftovers(self._out, self._results.read())

    def _changed_source(self, config: Mapping[str, Any]) -> FunctionRecord | None:
        """Return the task's source if a run was trained with another version of it, else None."""
        old = config.get("function")
        digest = self._source["sha256"]
        if not isinstance(old, Mapping) or digest is None or old.get("sha256") in (None, digest):
            return None
        return self._source

    def _write_head(self) -> ComparisonHead:
        """Write comparison.json, which has all fields of results.json except the runs."""
        grid = self._grid
        head = ComparisonHead(
            format=2,
            **grid.head(),
            goal=grid.goal,
            race=None if grid.race is None else grid.race.record(),
            data=grid.task.facts(self._data) or {},
            baselines=list(self._baselines),
        )
        try:
            write_json(self._out / COMPARISON_FILE, written(head))
        except InputError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(
                f"facts or baselines of {grid.task.name} cannot be stored ({error}): return only "
                "finite numbers, strings, lists and dicts"
            ) from error
        return head

    def write_results(self) -> ComparisonResults:
        """Write results.json from all runs in the folder, also those of other processes."""
        assert self._lease is not None
        return self._results.write(self._head, self._lease)

    def _keep_results(self) -> None:
        if is_main():
            self.write_results()


def train_free_runs(
    training: RunTraining,
    stop: Stop,
    listener: Listener,
    *,
    waits: bool = True,
) -> None:
    """Train the free runs of a grid, one after the other, until all runs are over.

    Args:
        training: trains a run. In a worker, a failed run counts as over, and a run that another
            worker has taken over is left to that worker.
        stop: whether a stop was requested.
        listener: receives events of the runs that other processes train or have ended.
        waits: wait for runs of other processes, in case one of these dies; otherwise return.

    Raises:
        InputError: as `RunTraining.train`.
        Stopped: the scheduler requested a stop.
    """
    results = training.results
    grid = results.grid
    free = _FreeRuns(training, listener, waits=waits)
    gate = _Gate(results, listener)
    left = [_Place(index, *run) for index, run in enumerate(grid.runs(), start=1)]
    while True:
        known = on_main(results.read)
        still_left, later = [], []
        for run in left:
            stop.check()
            turn = gate.turn_of(run)
            if turn == "later":
                later.append(run)
            elif turn == "now" and not free.is_settled(run, known):
                still_left.append(run)
        left = still_left + later
        gate.look()
        # A process that waits for a round of a race to end is needed for the next round.
        if not left or not (waits or later):
            return
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class _Place:
    """A run and its number in the grid."""

    index: int
    line: Line
    seed: int


class _Gate:
    """Decides which runs may be trained: all runs, or in a race those of the current round."""

    def __init__(self, results: Results, listener: Listener) -> None:
        self._grid = results.grid
        self._results = results
        self._listener = listener
        self._told: set[str] = set()

    def turn_of(self, run: _Place) -> Literal["now", "later", "never"]:
        """Return when a run may be trained, given the current results."""
        race = self.look()
        if race is None:
            return "now"
        name = run.line.folder(run.seed)
        if name in race.left_out:
            return "never"
        return "later" if name in race.waiting else "now"

    def look(self) -> Standing | None:
        """Report news of the race and return its standing; None without a race."""
        if self._grid.race is None:
            return None
        race = standing(self._grid, on_main(self._results.read))
        for sentence in race.news(self._told):
            self._listener(Notice(sentence))
        return race


class _FreeRuns:
    """Trains free runs."""

    def __init__(self, training: RunTraining, listener: Listener, *, waits: bool) -> None:
        self._training = training
        self._listener = listener
        self._waits = waits
        self._waited_for: set[str] = set()

    def is_settled(self, run: _Place, known: Mapping[str, RunResult]) -> bool:
        """Train a run unless it is over or another process trains it.

        Args:
            run: the run.
            known: results by the names of the runs.

        Returns:
            Whether the run is over.
        """
        name = run.line.folder(run.seed)
        if name in known and known[name].status in self._training.over:
            self._listener(RunEnded(known[name], skipped=True))
            return True
        try:
            return self._training.train(run.line, run.seed, run.index) is not None
        except LeaseHeldError as error:
            if self._waits and name not in self._waited_for:
                self._waited_for.add(name)
                self._listener(Notice(f"{str(error).rpartition(': ')[0]}; waiting for it"))
        except LeaseLostError as error:
            if not self._training.is_worker:
                raise
            if num_processes() > 1:
                # The other processes wait in a collective operation: only an exit ends them.
                raise RuntimeError(str(error)) from error
            self._listener(Notice(str(error)))
        return False
