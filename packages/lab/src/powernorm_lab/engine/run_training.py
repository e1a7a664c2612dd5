"""Training of single runs of a comparison in this process."""

import copy
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError, printable
from powernorm.files import check_own, remove
from powernorm.records import CONFIG_FILE
from powernorm_lab.engine.comparison_results import Results
from powernorm_lab.engine.events import Listener, Notice, RunEnded
from powernorm_lab.engine.folders import (
    check_same_settings,
    clear_unless_resumable,
    find_runs,
    last_checkpoint,
    read_json,
    remove_unfinished,
    write_json,
)
from powernorm_lab.engine.isolation import own_modes
from powernorm_lab.engine.leases import Lease, LeaseHeldError, LeaseLostError, read_owner
from powernorm_lab.engine.line import Line
from powernorm_lab.engine.outcomes import measured_result, result_of
from powernorm_lab.engine.processes import is_main, num_processes, on_main, own_device
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.state import seed_everything
from powernorm_lab.engine.stopping import Stop, Stopped
from powernorm_lab.runs import (
    CHECKPOINTS_FOLDER,
    COMPARISON_FILE,
    OVER,
    REPORT_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    WORK_FILE,
    Baseline,
    RunResult,
)
from powernorm_lab.schema import written

LOGGER = logging.getLogger(__name__)

_FATAL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errnos of an OSError that every other run would raise, too."""
_RESUMED: Final = "interrupted; --resume continues from the last checkpoint"


class RunTraining:
    """Trains runs of a grid one at a time, each under the lease of its folder.

    Args:
        results: results of the comparison.
        data: data that the task has prepared.
        baselines: baselines of the task.
        stop: whether a stop was requested.
        listener: receives the events of the runs.
        on_kept: is called when a run's result is written.
        resume: report runs that restart because they have no checkpoint.
        ran_on: description of the worker for the results; None in the process of `compare` itself.
    """

    def __init__(
        self,
        results: Results,
        data: Any,
        baselines: Sequence[Baseline],
        stop: Stop,
        listener: Listener,
        on_kept: Callable[[], object],
        *,
        resume: bool,
        ran_on: Mapping[str, Any] | None = None,
    ) -> None:
        self.results = results
        self._grid = results.grid
        self._out = results.out
        self._data = data
        self._baselines = baselines
        self._stop = stop
        self._listener = listener
        self._on_kept = on_kept
        self._resume = resume
        self._ran_on = ran_on
        self.is_worker = ran_on is not None
        # A run that failed in one worker would also fail in the next one.
        self.over = OVER | {"failed"} if self.is_worker else OVER
        """Statuses of runs that need no training."""
        self._fingerprint = self._grid.task.fingerprint(data)

    def train(self, line: Line, seed: int, index: int) -> RunResult | None:
        """Train a run and return its result; None if another process has finished it meanwhile.

        Args:
            line: line of the run.
            seed: seed of the run.
            index: number of the run in the grid, from 1.

        Raises:
            LeaseHeldError: another process trains the run.
            InputError: an error that other runs would raise, too.
        """
        folder = self._out / line.folder(seed)
        check_own(folder, folder / CHECKPOINTS_FOLDER)
        # The previous training function may have replaced the handlers or deferred the signals.
        self._stop.install()
        self._stop.defer(until_asked=False)
        if on_main(lambda: self._is_over(folder)):
            return None
        lease = self._lease(folder)
        is_over = False
        try:
            if on_main(lambda: self._is_over(folder)):  # ended before this process had the lease
                is_over = True
                return None
            on_main(lambda: self._begin(folder, line, seed))
            run = self._run(line, seed, folder, lease, index)
            result = self._outcome(run, line)
            is_over = result.status in OVER
        finally:
            if lease is not None:
                lease.release(forget=is_over)
        self._listener(RunEnded(result, skipped=False))
        return result

    def _lease(self, folder: Path) -> Lease | None:
        """Take a run's lease in the first process."""
        taken: list[Lease] = []

        def take() -> str | None:
            try:
                taken.append(Lease(folder))
            except LeaseHeldError as error:
                return str(error)
            return None

        held = on_main(take)
        if held is not None:
            raise LeaseHeldError(held)
        return taken[0] if taken else None

    def _is_over(self, folder: Path) -> bool:
        """Return whether another worker has finished the run since the last check."""
        result = self.results.read().get(folder.name)
        return result is not None and result.status in self.over

    def _begin(self, folder: Path, line: Line, seed: int) -> None:
        config = self._grid.config(line, seed, self._fingerprint)
        was_there = (folder / CONFIG_FILE).exists()
        clear_unless_resumable(folder)
        if (folder / CONFIG_FILE).exists():
            old = read_json(folder / CONFIG_FILE)
            check_same_settings(folder, old, config)
        remove_unfinished(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG_FILE, config)
        if self._resume and was_there and not last_checkpoint(folder).exists():
            self._listener(Notice(f"{folder.name} has no checkpoint yet and restarts"))

    def _run(self, line: Line, seed: int, folder: Path, lease: Lease | None, index: int) -> Run:
        return Run(
            norm=line.norm,
            label=line.name,
            seed=seed,
            folder=folder,
            device=own_device(self._grid.device),
            # A function may modify its settings.
            settings=copy.deepcopy(line.settings),
            data=self._data,
            baselines=self._baselines,
            num_steps=self._grid.task.num_steps(line.settings),
            norm_options=line.norm_options,
            lease=lease,
            stop=self._stop,
            listener=self._listener,
            index=index,
            num_runs=len(self._grid.lines) * len(self._grid.seeds),
            trial=self._grid.trial,
            score=self._grid.score,
            log_to=self._grid.log_to,
        )

    def _outcome(self, run: Run, line: Line) -> RunResult:
        """Train a run and write its result, also if the training fails or is interrupted."""
        try:
            result = run.ended or self._trained(run, line)
        except (KeyboardInterrupt, Stopped) as end:
            if isinstance(end, Stopped):
                self._stop.ignore()
            self._keep(run, result_of(run, line, "interrupted", message=_RESUMED))
            raise
        except InputError as error:
            # The other processes may be at another point: no collective operation here.
            if is_main() and not isinstance(error, LeaseLostError):
                # The settings do not fit the data: leave nothing that a next call would resume.
                clear_unless_resumable(run.folder)
                if not self.is_worker:
                    forget_comparison(self._out)
            raise
        except (Exception, SystemExit) as error:
            result = self._failed(run, line, error)
        return self._keep(run, result)

    def _trained(self, run: Run, line: Line) -> RunResult:
        try:
            seed_everything(run.seed)
            with self._stop.never_hidden(), own_modes():
                metrics = self._grid.task.start(run)
            if run.was_interrupted:
                raise Stopped
            result = measured_result(run, line, self._grid, metrics)
            # The first process decides: the goal may be finite in some processes only.
            if on_main(lambda: result.status) == "finished":
                run.keep_end(result)
            return result
        finally:
            run.close()

    def _failed(self, run: Run, line: Line, error: BaseException) -> RunResult:
        """Return the result of a run whose function raised an error; other runs continue."""
        if isinstance(error, OSError) and error.errno in _FATAL_ERRNOS:
            raise InputError(
                f"{run.folder} cannot be written ({error.strerror}): make room, then continue with "
                "--resume"
            ) from error
        if num_processes() > 1:
            # The others may wait in a collective operation: only an exit ends them.
            raise error
        LOGGER.error("The run %s failed.", run.folder.name, exc_info=error)
        return result_of(run, line, "failed", message=printable(f"{type(error).__name__}: {error}"))

    def _keep(self, run: Run, result: RunResult) -> RunResult:
        """Complete and write a run's result, and return it."""
        result = replace(result, ran_on=dict(self._ran_on or {}), study=self._grid.study)
        if is_main():
            with run.writing():
                write_json(run.folder / RESULT_FILE, written(result))
        self._on_kept()
        return result


def forget_comparison(out: Path) -> None:
    """Delete the files of a comparison without runs.

    Args:
        out: folder of the comparison.
    """
    if not find_runs(out):
        for name in (RESULTS_FILE, COMPARISON_FILE, WORK_FILE, REPORT_FILE):
            remove(out / name)


def remove_leftovers(out: Path, results: Mapping[str, RunResult]) -> None:
    """Delete leases and unfinished files of processes that were killed after writing a result.

    Args:
        out: folder of the comparison.
        results: results of its runs, by the names of their folders.
    """
    for name, result in results.items():
        owner = read_owner(out / name)
        if result.status in OVER and (owner is None or owner.is_gone):
            remove_unfinished(out / name, is_over=True)
