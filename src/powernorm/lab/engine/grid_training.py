"""The grid of a comparison: every norm and seed trained alike, and what came of it."""

import copy
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from powernorm.errors import InputError
from powernorm.lab.engine.events import Listener, Notice, RunEnded, ignore
from powernorm.lab.engine.folders import (
    LAST,
    check_folder,
    check_same_settings,
    clear_unless_resumable,
    find_runs,
    prepare_folder,
    read_json,
    read_result,
    remove_unfinished,
    write_json,
)
from powernorm.lab.engine.grid import Grid, Line
from powernorm.lab.engine.isolation import own_generators, own_modes, threads
from powernorm.lab.engine.leases import Lease, LeaseLostError, check_free
from powernorm.lab.engine.outcomes import measured_result, result_of
from powernorm.lab.engine.processes import (
    is_main,
    locally_first,
    num_processes,
    on_main,
    process_group,
)
from powernorm.lab.engine.run import Run
from powernorm.lab.engine.state import seed_everything
from powernorm.lab.engine.stopping import Stop, Stopped
from powernorm.runs import (
    CHECKPOINTS_FOLDER,
    COMPARISON_FILE,
    CONFIG_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    Baseline,
    ComparisonResults,
    FunctionRecord,
    RunResult,
)

LOGGER = logging.getLogger(__name__)

OVER: Final = ("finished", "diverged", "nonfinite")
"""Statuses of runs that `resume` leaves as they are."""
NO_PLACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Of an OSError: every other run would meet it, too."""
RESUMED: Final = "interrupted; --resume goes on from the last checkpoint"


def compare_grid(
    grid: Grid,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    on_event: Listener | None = None,
    on_data: Callable[[Any, Sequence[Baseline], Listener], None] | None = None,
) -> ComparisonResults:
    """Train every line with every seed, and write the runs and their results.

    Args:
        grid: what to train.
        out: folder of the comparison.
        resume: leave runs that are over as they are, and go on with the others.
        force: delete the runs that `out` holds first.
        on_event: is called with every event, in the first process.
        on_data: is called with the data and its baselines when they are ready.

    Returns:
        The contents of `results.json`.

    Raises:
        InputError: something given cannot be used, or another process trains in `out`.
        KeyboardInterrupt: after the run at hand has been marked as interrupted.
        Stopped: the same after SIGTERM or SIGUSR1.
    """
    out = out.absolute()  # whatever a training function makes the working directory
    stop = Stop()
    with stop.watching(), process_group(grid.device.type):
        lease = on_main_only(lambda: _take_folder(out, resume=resume, force=force))
        try:
            data = locally_first(lambda: grid.task.prepare(grid.settings))
            # Only now, when the data are known to be good, anything may be deleted.
            on_main(lambda: prepare_folder(out, resume=resume, force=force))
            listener = (on_event or ignore) if is_main() else ignore
            comparison = _Comparison(grid, out, data, lease, stop, listener, resume=resume)
            with own_generators(), threads(grid.num_threads):
                return comparison.run(on_data)
        finally:
            if lease is not None:
                lease.release(forget=True)


def on_main_only(function: Callable[[], Lease]) -> Lease | None:
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
        *,
        resume: bool,
    ) -> None:
        self._grid = grid
        self._out = out
        self._data = data
        self._lease = lease
        self._stop = stop
        self._listener = listener
        self._resume = resume
        self._fingerprint = grid.task.fingerprint(data)
        self._source = grid.task.source()
        self._read: dict[tuple[str, int | None], RunResult] = {}
        """Results by folder and time of writing."""
        # Read in one process: the first one soon writes in these folders.
        self._results = on_main(self._old_results)
        self._baselines = on_main(lambda: grid.task.baselines(data))

    def run(
        self, on_data: Callable[[Any, Sequence[Baseline], Listener], None] | None
    ) -> ComparisonResults:
        """Train what is not over."""
        if on_data is not None:
            on_data(self._data, self._baselines, self._listener)
        self._head = on_main(self._write_head)
        self._write_results()
        total = len(self._grid.lines) * len(self._grid.seeds)
        for index, (line, seed) in enumerate(self._grid.runs(), start=1):
            if self._stop.is_requested():
                raise Stopped("asked to stop by the scheduler")
            old = self._results.get(line.folder(seed))
            if old is not None and old["status"] in OVER:
                on_main(partial(remove_unfinished, self._out / line.folder(seed), is_over=True))
                self._listener(RunEnded(old, skipped=True))
            else:
                self._train(line, seed, index, total)
        return self._write_results()

    def _old_results(self) -> dict[str, RunResult]:
        """Return the results that are there, after checking that all runs had these settings."""
        changed: FunctionRecord | None = None
        for folder in find_runs(self._out):
            old = read_json(folder / CONFIG_FILE)
            changed = self._changed_source(old) or changed
            seed = old.get("seed")
            line = self._grid.line_of(folder, old)
            new = self._grid.config(line, seed if isinstance(seed, int) else 0, self._fingerprint)
            check_same_settings(folder, self._grid.as_written_now(old), new)
        if changed is not None:
            self._listener(
                Notice(
                    f"{changed['file']} has changed since runs in {self._out} were trained: "
                    "runs of before and after may not be comparable; --force begins anew"
                )
            )
        return self._read_results()

    def _read_results(self) -> dict[str, RunResult]:
        """Return what the runs in the folder came to, by the names of their folders.

        Files that were read before and have not changed since are not read again.
        """
        results = {}
        for folder in find_runs(self._out):
            path = folder / RESULT_FILE
            written = path.stat().st_mtime_ns if path.exists() else None
            if (folder.name, written) not in self._read:
                result = read_result(folder)
                if result is None:
                    continue
                # It is in the run's own file only.
                result.pop("study", None)
                self._read[folder.name, written] = result
            results[folder.name] = self._read[folder.name, written]
        return results

    def _changed_source(self, config: Mapping[str, Any]) -> FunctionRecord | None:
        """Return the source of the task where a run was made with another one."""
        old = config.get("function")
        digest = self._source["sha256"]
        if not isinstance(old, Mapping) or digest is None or old.get("sha256") == digest:
            return None
        return self._source

    def _train(self, line: Line, seed: int, index: int, num_runs: int) -> None:
        folder = self._out / line.folder(seed)
        # A training function may have taken the signals, or left them to wait.
        self._stop.install()
        self._stop.defer(until_asked=False)
        lease = on_main_only(lambda: Lease(folder))
        is_over = False
        try:
            on_main(lambda: self._begin(folder, line, seed))
            run = self._run(line, seed, folder, lease, (index, num_runs))
            result = self._outcome(run, line)
            is_over = result["status"] in OVER
        finally:
            if lease is not None:
                lease.release(forget=is_over)
        self._listener(RunEnded(result, skipped=False))

    def _begin(self, folder: Path, line: Line, seed: int) -> None:
        was_there = (folder / CONFIG_FILE).exists()
        clear_unless_resumable(folder)
        remove_unfinished(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG_FILE, self._grid.config(line, seed, self._fingerprint))
        if self._resume and was_there and not (folder / CHECKPOINTS_FOLDER / LAST).exists():
            self._listener(Notice(f"{folder.name} has no checkpoint yet, so it begins anew"))

    def _run(
        self, line: Line, seed: int, folder: Path, lease: Lease | None, place: tuple[int, int]
    ) -> Run:
        return Run(
            norm=line.norm,
            label=line.name,
            seed=seed,
            folder=folder,
            device=self._grid.device,
            # A function may change what it is given.
            settings=copy.deepcopy(line.settings),
            data=self._data,
            baselines=self._baselines,
            num_steps=self._grid.task.num_steps(line.settings),
            norm_options=line.norm_options,
            lease=lease,
            stop=self._stop,
            listener=self._listener,
            index=place[0],
            num_runs=place[1],
        )

    def _outcome(self, run: Run, line: Line) -> RunResult:
        """Train a run and keep its result, whatever comes of it."""
        try:
            result = self._trained(run, line)
        except (KeyboardInterrupt, Stopped) as end:
            if isinstance(end, Stopped):
                self._stop.ignore()
            self._keep(run, result_of(run, line, "interrupted", message=RESUMED))
            raise
        except InputError as error:
            # The other processes may be elsewhere: nothing here may wait for them.
            if is_main() and not isinstance(error, LeaseLostError):
                self._forget(run)
            raise
        except (Exception, SystemExit) as error:
            result = self._failed(run, line, error)
        self._keep(run, result)
        if result["status"] == "finished":
            run.keep_end()
        return result

    def _trained(self, run: Run, line: Line) -> RunResult:
        try:
            seed_everything(run.seed)
            with self._stop.never_hidden(), own_modes():
                metrics = self._grid.task.start(run)
            if run.was_interrupted:
                raise Stopped("asked to stop by the scheduler")
            return measured_result(run, line, self._grid, self._baselines, metrics)
        finally:
            run.close()

    def _failed(self, run: Run, line: Line, error: BaseException) -> RunResult:
        """Return the result of a run that broke, which must not cost the others."""
        if isinstance(error, OSError) and error.errno in NO_PLACE:
            raise InputError(
                f"{run.folder} cannot be written ({error.strerror}): make room, then go on with "
                "--resume."
            ) from error
        if num_processes() > 1:
            # The others may be waiting for this process: only an end sets them free.
            raise error
        LOGGER.error("The run %s failed.", run.folder.name, exc_info=error)
        return result_of(run, line, "failed", message=f"{type(error).__name__}: {error}")

    def _forget(self, run: Run) -> None:
        """Leave no trace of settings that fit everything but the data: the next try is a first."""
        clear_unless_resumable(run.folder)
        if not find_runs(self._out):
            (self._out / RESULTS_FILE).unlink(missing_ok=True)
            (self._out / COMPARISON_FILE).unlink(missing_ok=True)

    def _keep(self, run: Run, result: RunResult) -> None:
        study = self._grid.study
        own = {**result, "study": dict(study)} if study is not None else result
        if is_main():
            assert run.lease is not None
            with run.lease.writing():
                write_json(run.folder / RESULT_FILE, own)
        self._results[run.folder.name] = result
        self._write_results()

    def _write_head(self) -> dict[str, Any]:
        """Write comparison.json: everything that results.json says but the runs."""
        head = {
            "format": 2,
            **self._grid.head(),
            "goal": {"metric": self._grid.goal, "direction": self._grid.direction},
        }
        facts = self._grid.task.facts(self._data)
        if facts:
            head["data"] = facts
        if self._baselines:
            head["baselines"] = self._baselines
        write_json(self._out / COMPARISON_FILE, head)
        return head

    def _write_results(self) -> ComparisonResults:
        """Put together what the runs in the folder came to, whoever trained them."""
        if not is_main():
            return cast(ComparisonResults, {**self._head, "runs": self._ordered_results()})
        assert self._lease is not None
        with self._lease.writing():
            self._results = self._read_results()
            results = cast(ComparisonResults, {**self._head, "runs": self._ordered_results()})
            write_json(self._out / RESULTS_FILE, results)
        return results

    def _ordered_results(self) -> list[RunResult]:
        """Return the results by line, then seed; those of an earlier call with others last."""
        names = [line.folder(seed) for line in self._grid.lines for seed in self._grid.seeds]
        ordered = dict.fromkeys([*names, *self._results])
        return [self._results[name] for name in ordered if name in self._results]
