"""The grid of a comparison: every norm and seed trained alike, and what came of it."""

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
from powernorm_lab.engine.run_training import RunTraining, remove_rests
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
"""Between two looks at runs that other processes train."""


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
        resume: leave runs that are over as they are, and go on with the others.
        force: delete the runs that `out` holds first.
        on_event: is called with every event, in the first process.
        announces: tell the listener what the data are.
        executor: starts the workers that train; None trains here, one run after the other.
        plan_only: train nothing: what workers need is there.

    Returns:
        The contents of `results.json`.

    Raises:
        InputError: something given cannot be used, or another process trains in `out`.
        KeyboardInterrupt: after the run at hand has been marked as interrupted.
        Stopped: the same after SIGTERM or SIGUSR1.
    """
    check_race(grid)
    check_trackers(grid.log_to)
    if executor is not None and are_several():
        raise InputError(
            "the processes of torchrun train every run together, and so start no workers: leave "
            "out --jobs and --executor, or give --devices in place of torchrun"
        )
    try:
        work: dict[str, Any] | None = grid.work_record()
    except InputError:  # a function of a prompt or a notebook, which only this process has
        if plan_only or executor is not None:
            raise
        work = None
    out = out.absolute()  # whatever a training function makes the working directory
    stop = Stop()
    with stop.watching(), process_group(grid.device.type):
        lease = _on_main_only(lambda: _take_folder(out, resume=resume, force=force))
        try:
            data = locally_first(lambda: grid.task.prepare(grid.settings))
            # Only now, when the data are known to be good, anything may be deleted.
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
    """Take a comparison's folder, or refuse it."""
    check_free(out)
    check_folder(out, resume=resume, force=force)
    lease = Lease(out)
    try:
        # Another process may have been here in between.
        check_folder(out, resume=resume, force=force)
    except BaseException:
        lease.release(forget=True)
        raise
    return lease


class _Comparison:
    """The runs of one call and the results that they share."""

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
        # Read in one process: the first one soon writes in these folders.
        on_main(self._check_old_runs)
        self._baselines = on_main(lambda: grid.task.baselines(data, grid.settings))

    def begin(self, work: Mapping[str, Any] | None, *, announces: bool) -> None:
        """Tell what the data are and write what is known before the first run."""
        if announces:
            self._grid.task.announce(self._data, self._baselines, self._listener)
        self._head = on_main(self._write_head)
        if work is not None and is_main():
            write_json(self._out / WORK_FILE, work)
        self._keep_results()

    def train(self, *, resume: bool) -> None:
        """Train what is not over in this process."""
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
        """Let workers train what is not over."""
        assert self._lease is not None
        coordinate(self._results, executor, self._stop, self._listener, self.write_results)

    def _check_old_runs(self) -> None:
        """Check that all runs that are there had these settings, and that there is a place for all.

        Before anything is trained: of the last run, too.
        """
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
                    f"{changed['file']} has changed since runs in {self._out} were trained: "
                    "runs of before and after may not be comparable; --force begins anew"
                )
            )
        remove_rests(self._out, self._results.read())

    def _changed_source(self, config: Mapping[str, Any]) -> FunctionRecord | None:
        """Return the source of the task where a run was made with another one."""
        old = config.get("function")
        digest = self._source["sha256"]
        if not isinstance(old, Mapping) or digest is None or old.get("sha256") == digest:
            return None
        return self._source

    def _write_head(self) -> ComparisonHead:
        """Write comparison.json: everything that results.json says but the runs."""
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
                f"facts or baselines of {grid.task.name} cannot be stored ({error}): return "
                "numbers that are finite, texts, and lists and dicts of them"
            ) from error
        return head

    def write_results(self) -> ComparisonResults:
        """Put together what the runs in the folder came to, whoever trained them."""
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
    """Train the runs of a grid that nobody else trains, one after the other, until all are over.

    Args:
        training: trains one. Of a worker, a run that failed is over for now, and one that was taken
            over by another worker is that one's.
        stop: says when to stop.
        listener: is told of runs that others have ended, or train.
        waits: for runs that others train, in case these others come to grief; else it leaves.

    Raises:
        InputError: as `RunTraining.train`.
        Stopped: the scheduler asked for it.
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
        # Who waits for a round of a race to end is needed at once in the next one.
        if not left or not (waits or later):
            return
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class _Place:
    """A run of a grid."""

    index: int
    line: Line
    seed: int


class _Gate:
    """Says which runs may be trained: all of them, but in a race."""

    def __init__(self, results: Results, listener: Listener) -> None:
        self._grid = results.grid
        self._results = results
        self._listener = listener
        self._told: set[str] = set()

    def turn_of(self, run: _Place) -> Literal["now", "later", "never"]:
        """Return when a run may be trained, by what the runs have come to by now."""
        race = self.look()
        if race is None:
            return "now"
        name = run.line.folder(run.seed)
        if name in race.left_out:
            return "never"
        return "later" if name in race.waiting else "now"

    def look(self) -> Standing | None:
        """Return what the race has come to, and tell what is new; None where there is none."""
        if self._grid.race is None:
            return None
        race = standing(self._grid, on_main(self._results.read))
        for sentence in race.news(self._told):
            self._listener(Notice(sentence))
        return race


class _FreeRuns:
    """Trains those of the runs that are free."""

    def __init__(self, training: RunTraining, listener: Listener, *, waits: bool) -> None:
        self._training = training
        self._listener = listener
        self._waits = waits
        self._waited_for: set[str] = set()

    def is_settled(self, run: _Place, known: Mapping[str, RunResult]) -> bool:
        """Train a run, or see that it is over or another process has it.

        Args:
            run: to train.
            known: results by the names of the runs.

        Returns:
            Whether nothing is left to do for it.
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
                self._listener(Notice(f"{str(error).rpartition(': ')[0]}; waits for it"))
        except LeaseLostError as error:
            if not self._training.is_worker:
                raise
            if num_processes() > 1:
                # The others are in the middle of the run: only an end sets them free.
                raise RuntimeError(str(error)) from error
            self._listener(Notice(str(error)))
        return False
