"""The grid of a comparison: every norm and seed trained alike, and what came of it."""

import copy
import errno
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch

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
from powernorm.lab.engine.leases import Lease, LeaseLostError, check_free
from powernorm.lab.engine.processes import (
    is_main,
    locally_first,
    num_processes,
    on_main,
    process_group,
)
from powernorm.lab.engine.run import Run
from powernorm.lab.engine.state import random_states, seed_everything, set_random_states
from powernorm.lab.engine.stopping import Stop, Stopped
from powernorm.lab.engine.tasks import Metrics, Task
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
    Status,
    run_name,
)

LOGGER = logging.getLogger(__name__)

OVER: Final = ("finished", "diverged", "nonfinite")
"""Statuses of runs that `resume` leaves as they are."""
NO_PLACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Of an OSError: every other run would meet it, too."""
RESUMED: Final = "interrupted; --resume goes on from the last checkpoint"


@dataclass(frozen=True)
class Line:
    """One line of the table: what is trained with every seed."""

    norm: str
    """Short name, or `module:Class`."""
    settings: Any
    """Of these runs, as the task has them."""
    norm_options: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    """Name of a variant; None is the norm's."""
    placement: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the results of its runs say."""

    @property
    def name(self) -> str:
        """Name in folders, tables and figures."""
        return self.label or self.norm

    def folder(self, seed: int) -> str:
        """Return the name of a run's folder."""
        return run_name(self.name, self.placement, seed)


@dataclass(frozen=True)
class Grid:
    """Everything that is trained, and how the files speak of it."""

    task: Task
    lines: Sequence[Line]
    seeds: Sequence[int]
    goal: str
    """The metric that the comparison is about."""
    direction: Literal["min", "max"]
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
    study: Mapping[str, Any] | None = None
    """What a run's own result says of the study, should results.json be lost."""

    def runs(self) -> Iterator[tuple[Line, int]]:
        """Yield the runs in the order of training: all lines of a seed before the next seed."""
        for seed in self.seeds:
            for line in self.lines:
                yield line, seed


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
            with _own_generators(), _threads(grid.num_threads):
                return comparison.run(on_data)
        finally:
            if lease is not None:
                _give_back(lease)


def on_main_only(function: Callable[[], Lease]) -> Lease | None:
    """Call a function in the first process; an InputError is raised in all."""
    kept: list[Lease] = []
    on_main(lambda: kept.append(function()))
    return kept[0] if kept else None


def _take_folder(out: Path, *, resume: bool, force: bool) -> Lease:
    """Take a comparison's folder, or refuse it."""
    check_free(out)
    check_folder(out, resume=resume, force=force)
    # What a refusal later on leaves behind, if it is empty by then.
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    lease = Lease(out)
    lease.made_folders = made
    try:
        # Another process may have been here in between.
        check_folder(out, resume=resume, force=force)
    except BaseException:
        _give_back(lease)
        raise
    return lease


def _give_back(lease: Lease) -> None:
    """Release a comparison's folder, and leave none behind that is new and empty."""
    lease.release(forget=True)
    with suppress(OSError):
        for folder in lease.made_folders:
            folder.rmdir()


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
            check_same_settings(folder, old, new)
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
            self._keep(run, _result(run, line, "interrupted", message=RESUMED))
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
            with self._stop.never_hidden(), _own_modes():
                metrics = self._grid.task.start(run)
            if run.was_interrupted:
                raise Stopped("asked to stop by the scheduler")
            return self._measured(run, line, metrics)
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
        return _result(run, line, "failed", message=f"{type(error).__name__}: {error}")

    def _measured(self, run: Run, line: Line, metrics: Metrics) -> RunResult:
        """Return the result of a run that came to its end."""
        if "status" in run.recorded:
            return _result(run, line, run.recorded["status"], checked_metrics(metrics))
        if run.is_nonfinite:
            message = f"the loss was NaN or infinite; stopped at step {run.step}"
            return _result(run, line, "nonfinite", message=message)
        if not run.uses_norm:
            raise InputError(
                f"{self._grid.task.name} called neither run.swap nor run.build_norm, so that every "
                "norm would train the same model: build the model with one of them"
            )
        found = checked_metrics(metrics)
        goal = self._grid.goal
        if goal not in found:
            raise InputError(
                f"{self._grid.task.name} returned no {goal!r}, which is the goal (it returned "
                f"{', '.join(found) or 'nothing'}): return it, or give another goal; --resume goes "
                "on from the checkpoint at the end of the training"
            )
        value = found[goal]
        if value is None:
            message = f"{goal} is NaN, infinite or None"
            return _result(run, line, "nonfinite", found, message)
        floor = self._baselines[0]["metrics"].get(goal) if self._baselines else None
        if floor is not None and (
            value > floor if self._grid.direction == "min" else value < floor
        ):
            message = f"{goal} is worse than that of {self._baselines[0]['name']}"
            return _result(run, line, "diverged", found, message)
        return _result(run, line, "finished", found)

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


def _result(
    run: Run,
    line: Line,
    status: Status,
    metrics: Mapping[str, float | None] | None = None,
    message: str | None = None,
) -> RunResult:
    """Return what result.json says of a run."""
    result: dict[str, Any] = {"norm": line.norm, "seed": run.seed}
    if line.placement is not None:
        result["placement"] = line.placement
    result |= {
        "status": status,
        "metrics": dict(metrics or {}),
        "tid": None,
        "seconds": round(run.seconds, 3),
        "tokens_per_second": None,
        "parameters": run.num_parameters,
        "folder": run.folder.name,
        **line.extra,
    }
    recorded = {key: value for key, value in run.recorded.items() if key != "status"}
    if metrics:
        recorded.pop("metrics", None)
    result |= recorded
    if message is not None:
        result["message"] = message
    return cast(RunResult, result)


def checked_metrics(metrics: Any) -> dict[str, float | None]:
    """Return what a training function returned as numbers; None for what is not finite.

    Raises:
        InputError: it is no mapping of names to numbers.
    """
    if not isinstance(metrics, Mapping):
        raise InputError(
            f"the training function returned {metrics!r:.80}, expected a dict of metrics such as "
            "{'valid_loss': 1.23}"
        )
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        try:
            plain = value.detach() if isinstance(value, torch.Tensor) else value
            number = None if plain is None else float(plain)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"the training function returned {name}={value!r:.80}, expected a number"
            ) from None
        found[str(name)] = number if number is not None and math.isfinite(number) else None
    return found


@contextmanager
def _own_generators() -> Iterator[None]:
    """Let the runs seed the random generators; the caller's are as before afterwards."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@contextmanager
def _own_modes() -> Iterator[None]:
    """Let a run change what holds for the whole process: the next one finds it as it was."""
    folder, dtype, num_threads = Path.cwd(), torch.get_default_dtype(), torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.enable_grad():
            yield
    finally:
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
