"""Coordination of workers: one process starts, monitors and replaces them.

The coordinator and its workers share nothing but the folder. A worker leases one free run after
the other and exits when none is free; it reports nothing. The coordinator reads the progress of
runs from their logs, and the exit status of a worker from its executor. A lost worker costs only
time: when its lease has expired, another worker resumes its run from the last checkpoint.
"""

import csv
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from powernorm.errors import InputError
from powernorm.files import read_text
from powernorm_lab.engine.comparison_results import Results
from powernorm_lab.engine.events import (
    Event,
    Listener,
    Notice,
    RunEnded,
    RunStarted,
    logged,
)
from powernorm_lab.engine.folders import find_runs, write_json
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.leases import Lease, LeaseHeldError, Owner, is_alive, read_owner
from powernorm_lab.engine.line import Line
from powernorm_lab.engine.logs import STEP
from powernorm_lab.engine.outcomes import result_without_training
from powernorm_lab.engine.race import standing
from powernorm_lab.engine.run_training import forget_comparison, remove_leftovers
from powernorm_lab.engine.stopping import Stop, Stopped
from powernorm_lab.runs import METRICS_FILE, OVER, RESULT_FILE, RunResult
from powernorm_lab.schema import written

POLL_SECONDS: Final = 0.25
STOP_SECONDS: Final = 120.0
"""Seconds in which workers have to finish their step and save before they are killed."""


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended."""

    kind: Literal["left", "stopped", "failed", "lost"]
    """`left`: found no free run; `stopped`: saved and exited on request; `failed`: raised an error
    that every worker would raise; `lost`: was killed, or crashed."""
    message: str


class Worker(Protocol):
    """A process, possibly on another machine, that trains free runs."""

    name: str

    def poll(self) -> WorkerEnd | None:
        """Return how the worker ended; None while it runs."""

    def stop(self) -> None:
        """Ask the worker to finish its step, save and exit."""

    def kill(self) -> None:
        """End the worker at once."""


class Executor(Protocol):
    """Starts workers on this machine or on a cluster."""

    num_workers: int
    """Maximal number of workers at a time."""
    retries: int
    """Number of times that a run is retried after its worker was lost."""

    def start(self, names: Sequence[str]) -> Sequence[Worker]:
        """Start a worker for each name."""

    def close(self) -> None:
        """Release resources after all workers have ended; the creator of the executor calls it."""


def coordinate(
    results: Results,
    executor: Executor,
    stop: Stop,
    listener: Listener,
    write_results: Callable[[], Any],
) -> None:
    """Let workers train the unfinished runs, and report their progress.

    Args:
        results: of the comparison; its work.json lists what the workers train.
        executor: starts the workers.
        stop: whether a stop was requested.
        listener: receives the events.
        write_results: is called when a run has ended.

    Raises:
        InputError: a worker raised an error that every worker would raise.
        KeyboardInterrupt: after the workers have saved and exited.
        Stopped: the same after SIGTERM or SIGUSR1.
    """
    coordination = _Coordination(results, executor, listener, write_results)
    try:
        coordination.run(stop)
    except (InputError, KeyboardInterrupt, Stopped):
        coordination.stop()
        raise
    finally:
        coordination.close()


class _Coordination:
    """The workers of one comparison and the state of its runs."""

    def __init__(
        self,
        results: Results,
        executor: Executor,
        listener: Listener,
        write_results: Callable[[], Any],
    ) -> None:
        grid, out = results.grid, results.out
        self._results = results
        self._grid = grid
        self._out = out
        self._executor = executor
        self._listener = listener
        self._write_results = write_results
        self._workers: dict[str, Worker] = {}
        self._num_started = 0
        self._num_lost = 0
        self._num_ended = 0
        self._open = dict.fromkeys(line.folder(seed) for line, seed in grid.runs())
        """Unfinished runs, in the order of training."""
        self._told: set[str] = set()
        """Sentences on the race that were reported."""
        self._waiting: Set[str] = set()
        """Runs of later rounds of a race."""
        self._settle_old()
        # From now on every new owner of a run is a worker.
        self._watches = {
            line.folder(seed): _RunWatch(grid, line, seed, index, out)
            for index, (line, seed) in enumerate(grid.runs(), start=1)
        }

    def run(self, stop: Stop) -> None:
        """Start workers and replace lost ones until every run has its result."""
        while self._open:
            stop.check()
            self._look_at_workers()
            self._look_at_runs()
            self._look_at_race()
            self._start_workers()
            if self._open:
                time.sleep(POLL_SECONDS)
        self._wait_for_workers(STOP_SECONDS)

    def stop(self) -> None:
        """Ask the workers to save and exit, and wait for them."""
        for worker in self._workers.values():
            worker.stop()
        self._wait_for_workers(STOP_SECONDS)
        self._settle()

    def close(self) -> None:
        """Kill the remaining workers; their files stay."""
        for worker in self._workers.values():
            worker.kill()
        if find_runs(self._out):
            self._write_results()
            remove_leftovers(self._out, self._results.read())
        else:  # the settings do not fit the data: nothing to resume
            forget_comparison(self._out)

    def _settle_old(self) -> None:
        """Report runs that are over, and mark failed ones so that workers retry them."""
        for name, result in self._results.read().items():
            if name not in self._open:
                continue
            if result.status in OVER:
                del self._open[name]
                self._listener(RunEnded(result, skipped=True))
            elif result.status == "failed":
                # Workers do not retry `failed` runs: one of this call may have tried them.
                self._write(name, replace(result, status="interrupted"))

    def _write(self, name: str, result: RunResult) -> None:
        """Write a run's result on behalf of a worker."""
        lease = Lease(self._out / name)
        try:
            with lease.writing():
                write_json(self._out / name / RESULT_FILE, written(result))
        finally:
            lease.release()

    def _look_at_workers(self) -> None:
        for name, worker in list(self._workers.items()):
            end = worker.poll()
            if end is None:
                continue
            del self._workers[name]
            if end.kind == "failed":
                raise InputError(end.message)
            if end.kind == "lost":
                self._num_lost += 1
                self._check_that_workers_begin(end.message)
                self._listener(Notice(f"{name} was lost ({end.message}) and is replaced"))

    def _check_that_workers_begin(self, message: str) -> None:
        """Raise an InputError if workers are lost before they lease a run: more would be, too."""
        attempts = sum(watch.num_attempts for watch in self._watches.values())
        before_a_run = self._num_lost - (attempts - self._num_ended)
        if before_a_run > self._executor.num_workers + self._executor.retries:
            raise InputError(f"workers are lost before they train anything: {message}")

    def _look_at_runs(self) -> None:
        # Finished runs first: another worker may lease one for a moment.
        self._settle()
        for name in self._open:
            for event in self._watches[name].events():
                self._listener(event)
        for name in list(self._open):
            attempts = self._watches[name].num_attempts
            if attempts > self._executor.retries and self._watches[name].is_abandoned():
                self._give_up(name, attempts)

    def _settle(self) -> None:
        """Report the runs that have a result."""
        ended = {
            name: result
            for name, result in self._results.read().items()
            if name in self._open and result.status in OVER | {"failed"}
        }
        if ended:
            self._write_results()
        for name, result in ended.items():
            for event in self._watches[name].events(is_over=True):
                self._listener(event)
            del self._open[name]
            self._num_ended += 1
            self._listener(RunEnded(result, skipped=False))

    def _look_at_race(self) -> None:
        """Drop the runs that the race no longer needs."""
        if self._grid.race is None:
            return
        race = standing(self._grid, self._results.read())
        for sentence in race.news(self._told):
            self._listener(Notice(sentence))
        self._open = dict.fromkeys(name for name in self._open if name not in race.left_out)
        self._waiting = self._open.keys() & race.waiting

    def _give_up(self, name: str, attempts: int) -> None:
        watch = self._watches[name]
        message = (
            f"its worker was lost {attempts} times (killed, or out of memory?); see "
            f"{self._out / 'workers'}, and --retries"
        )
        try:
            self._write(
                name, result_without_training(watch.line, watch.seed, name, "failed", message)
            )
        except LeaseHeldError:  # another worker was faster
            return
        self._settle()

    def _start_workers(self) -> None:
        busy = sum(watch.is_held for name, watch in self._watches.items() if name in self._open)
        free = len(self._open) - len(self._waiting) - busy
        idle = max(0, len(self._workers) - busy)
        wanted = min(free - idle, self._executor.num_workers - len(self._workers))
        if wanted <= 0:
            return
        numbers = range(self._num_started + 1, self._num_started + wanted + 1)
        self._num_started += wanted
        for worker in self._executor.start([f"worker-{number}" for number in numbers]):
            self._workers[worker.name] = worker

    def _wait_for_workers(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._workers and time.monotonic() < deadline:
            for name, worker in list(self._workers.items()):
                if worker.poll() is not None:
                    del self._workers[name]
            if self._workers:
                time.sleep(POLL_SECONDS / 5)


class _RunWatch:
    """Watches a run's folder for progress."""

    def __init__(self, grid: Grid, line: Line, seed: int, index: int, out: Path) -> None:
        self.line = line
        self.seed = seed
        self.is_held = False
        """Whether a live process trains the run, as of the last call of `events`."""
        self.num_attempts = 0
        """Number of owners that the run has had in this call."""
        self._folder = out / line.folder(seed)
        self._grid = grid
        self._index = index
        self._owner: Owner | None = read_owner(self._folder)
        self._step = 0
        self._written: tuple[int, int] | None = None

    def is_abandoned(self) -> bool:
        """Return whether the run's last owner has died without releasing the lease."""
        owner = read_owner(self._folder)
        return owner is not None and not owner.released and not is_alive(self._folder, owner)

    def events(self, *, is_over: bool = False) -> Iterator[Event]:
        """Yield the events since the last call.

        Args:
            is_over: the run has its result, possibly before any owner was seen.
        """
        owner = read_owner(self._folder)
        self.is_held = owner is not None and is_alive(self._folder, owner)
        is_new = owner is not None and (self._owner is None or owner.key != self._owner.key)
        # A worker that leases a finished run only checks it and releases it.
        if not self.num_attempts if is_over else is_new:
            self._owner = owner or self._owner
            self.num_attempts += 1
            steps = self._grid.task.num_steps(self.line.settings)
            total = len(self._grid.lines) * len(self._grid.seeds)
            yield RunStarted(self.line.name, self.seed, self._index, total, steps, self._step)
        for row in self._new_rows():
            yield from self._events_of(row)

    def _new_rows(self) -> Iterator[dict[str, str]]:
        path = self._folder / METRICS_FILE
        try:
            stat = path.stat()
            if self._written == (stat.st_mtime_ns, stat.st_size):
                return
            self._written = stat.st_mtime_ns, stat.st_size
            text = read_text(path)
        except (FileNotFoundError, InputError):
            return
        whole = text[: text.rfind("\n") + 1]
        for row in csv.DictReader(whole.splitlines()):
            if row.get(STEP, "").isdigit() and int(row[STEP]) > self._step:
                self._step = int(row[STEP])
                yield row

    def _events_of(self, row: Mapping[str, str]) -> Iterator[Event]:
        """Yield the events that a row of metrics.csv records."""
        values = {name: _number(cell) for name, cell in row.items()}
        return logged(self.line.name, self.seed, int(row[STEP]), values, self._grid.score)


def _number(cell: str | None) -> float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return None
