"""Workers of a comparison: `powernorm work` and the instructions in the comparison's folder."""

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Literal

from annotated_types import Len
from pydantic import (
    NonNegativeInt,
    PositiveInt,
)

from powernorm.errors import InputError
from powernorm_lab.engine.comparison_results import Results
from powernorm_lab.engine.events import Listener, ignore
from powernorm_lab.engine.executors.choice import Workers
from powernorm_lab.engine.folders import read_json
from powernorm_lab.engine.grid import Grid, Race
from powernorm_lab.engine.grid_training import train_free_runs
from powernorm_lab.engine.isolation import own_generators, threads
from powernorm_lab.engine.leases import Lease, LeaseHeldError, LeaseLostError
from powernorm_lab.engine.processes import (
    is_main,
    locally_first,
    num_processes,
    on_main,
    process_group,
)
from powernorm_lab.engine.run_training import RunTraining
from powernorm_lab.engine.stopping import Stop
from powernorm_lab.engine.tasks import SCRIPT, Task, TrainingFunction, task_of
from powernorm_lab.engine.trackers import TRACKERS, check_trackers
from powernorm_lab.engine.trials import TrialRules
from powernorm_lab.own_grid import own_grid
from powernorm_lab.runs import (
    COMPARISON_FILE,
    RESULTS_FILE,
    WORK_FILE,
    ComparisonHead,
    ComparisonResults,
)
from powernorm_lab.schema import read_record, record_of
from powernorm_lab.settings.comparison import ComparisonSettings, Notes, Variant

TURN_SECONDS: Final = 0.1
PLAN_AGAIN: Final = "write it again by `powernorm compare … --plan --resume`"


def with_threads(
    config: ComparisonSettings,
    workers: Workers,
    num_threads: int | None,
    resumed: Path | None = None,
) -> ComparisonSettings:
    """Return the settings of a built-in task with the number of CPU threads of a run.

    Args:
        config: settings to change.
        workers: workers that train.
        num_threads: threads of each run; None is the settings' value, else as in
            `Workers.threads`.
        resumed: as in `Workers.threads`.
    """
    chosen = workers.threads(num_threads or config.training.num_threads, resumed)
    return replace(config, training=replace(config.training, num_threads=chosen))


def read_work(out: Path) -> Grid:
    """Read from work.json in a comparison's folder what a worker trains.

    Raises:
        InputError: the file does not exist, or cannot be used here.
    """
    path = out / WORK_FILE
    if not path.exists():
        raise InputError(
            f"{out} has no {WORK_FILE}, which says what to train: create it with "
            "`powernorm compare … --plan`"
        )
    record = read_record(_Work, path, PLAN_AGAIN, exact=True)
    head = _read_head(out)
    try:
        grid = _recorded_grid(record, head)
    except InputError as error:
        if str(out) in str(error):
            raise
        raise InputError(f"{path}: {error}") from error
    return replace(grid, race=record.race, trial=record.trial, log_to=record.log_to)


def named_code(out: Path) -> list[str]:
    """Return the norms and the function that a worker of a comparison's folder imports."""
    path = out / WORK_FILE
    if not path.exists():
        return []
    record = read_json(path)
    own = record_of(_Work, record, str(path), PLAN_AGAIN, exact=True).own
    function = [] if own is None else [own.function]
    names = [f"{one.module or one.script}:{one.name}" for one in function]
    return [*names, *dict.fromkeys(_named_norms(record))]


def _named_norms(value: object, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _named_norms(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _named_norms(item, key)
    elif isinstance(value, str) and "norm" in key and ":" in value:
        yield value


def _read_head(out: Path) -> ComparisonHead:
    return read_record(ComparisonHead, out / COMPARISON_FILE, PLAN_AGAIN, exact=True)


@dataclass(frozen=True)
class _FunctionPlace:
    """Location of a function for a worker: a module or a script, and a name in it."""

    name: str
    module: str | None = None
    script: str | None = None

    def __post_init__(self) -> None:
        if (self.module is None) == (self.script is None):
            raise ValueError("neither a module nor a script")


@dataclass(frozen=True)
class _OwnWork:
    """Work of a user's function in work.json."""

    function: _FunctionPlace
    norms: list[str]
    seeds: Annotated[list[NonNegativeInt], Len(1)]
    goal: dict[str, str]
    settings: dict[str, Any]
    norm_options: dict[str, dict[str, Any]]
    device: str
    num_threads: PositiveInt | None
    variants: list[Variant]


@dataclass(frozen=True)
class _Work:
    """Contents of work.json."""

    format: Literal[1]
    comparison: dict[str, Any] | None = None
    """Settings of a built-in task; None if `own` is set."""
    own: _OwnWork | None = None
    path: list[str] = field(default_factory=list)
    """Folders from which modules are imported."""
    race: Race | None = None
    trial: TrialRules | None = None
    log_to: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.comparison is None) == (self.own is None):
            raise ValueError("neither a built-in task nor a function")
        unknown = [name for name in self.log_to if name not in TRACKERS]
        if unknown:
            raise ValueError(f"there is no tracker {unknown[0]!r}")


def _recorded_grid(record: _Work, head: ComparisonHead) -> Grid:
    if record.own is None:
        # Not imported for a user's function.
        from powernorm_lab.tasks.builtin import grid_of
        from powernorm_lab.tasks.registry import settings_from

        return grid_of(settings_from(record.comparison or {}), Notes(head.goal))
    own = record.own
    sys.path += [part for part in record.path if part not in sys.path and Path(part).exists()]
    return own_grid(
        _imported(own.function),
        norms=own.norms,
        seeds=own.seeds,
        goal=own.goal,
        settings=own.settings,
        norm_options=own.norm_options,
        device=own.device,
        num_threads=own.num_threads,
        variants=own.variants,
    )


def _imported(where: _FunctionPlace) -> Task | TrainingFunction:
    if where.script is None:
        return task_of(f"{where.module}:{where.name}")
    path = Path(where.script)
    specification = importlib.util.spec_from_file_location(SCRIPT, path)
    if specification is None or specification.loader is None or not path.is_file():
        raise InputError(f"{path} cannot be imported: check that it exists on this machine, too")
    module: ModuleType = importlib.util.module_from_spec(specification)
    sys.modules[SCRIPT] = module
    specification.loader.exec_module(module)
    found: Any = module
    for part in where.name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise InputError(
            f"{path} has no {where.name}: check that the file is the same on this machine"
        )
    return task_of(found)


def work(
    out: Path,
    *,
    worker: str | None = None,
    on_event: Listener | None = None,
) -> int:
    """Train the runs of a comparison's folder that no other worker trains, until none is left.

    Args:
        out: folder of the comparison.
        worker: name of a worker that `compare` started; `compare` itself writes results.json and
            replaces lost workers. None is a worker that was started by hand: it writes
            results.json, and waits for runs of other workers in case one of them dies.
        on_event: function that receives events.

    Returns:
        The number of failed runs.

    Raises:
        InputError: the folder has no work, or it cannot be used here.
        KeyboardInterrupt: after the current run has been marked as interrupted.
        Stopped: the same after SIGTERM or SIGUSR1.

    Distributed:
        Under `torchrun` every process calls it. Together they are one worker: all of them train
        each run, and the first one acquires the leases and writes the files.
    """
    out = out.absolute()
    grid = read_work(out)
    check_trackers(grid.log_to)
    stop = Stop()
    with (
        stop.watching(),
        process_group(grid.device.type),
        own_generators(),
        threads(grid.num_threads),
    ):
        listener = (on_event or ignore) if is_main() else ignore
        results = Results(grid, out)
        write_results = partial(_write_shared_results, results)
        data = locally_first(lambda: grid.task.prepare(grid.settings))
        training = RunTraining(
            results,
            data,
            on_main(lambda: grid.task.baselines(data, grid.settings)),
            stop,
            listener,
            write_results if worker is None and is_main() else (lambda: None),
            resume=True,
            ran_on=_here(worker),
        )
        waits = worker is None
        train_free_runs(training, stop, listener, waits=waits)
        if worker is None:
            on_main(lambda: write_results(is_last=True))
        known = on_main(results.read)
    return sum(result.status == "failed" for result in known.values())


def _here(worker: str | None) -> dict[str, Any]:
    """Return host, worker and GPU for the results of this worker's runs."""
    place: dict[str, Any] = {"host": socket.gethostname()}
    if worker is not None:
        place["worker"] = worker
    if num_processes() > 1:
        place["processes"] = num_processes()
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    return place if gpu is None else {**place, "gpu": gpu}


def _write_shared_results(results: Results, *, is_last: bool = False) -> None:
    """Write results.json of a folder that several processes share, under its lease.

    A `compare` that holds the folder's lease writes the file itself.

    Args:
        results: results of the comparison.
        is_last: delete the lease, and wait until the file has all results.
    """
    out = results.out
    while True:
        # Read each time, because a `compare --resume` may have added norms or seeds.
        head = _read_head(out)
        try:
            lease = Lease(out)
            try:
                results.write(head, lease)
            finally:
                lease.release(forget=is_last)
        except (LeaseHeldError, LeaseLostError):
            if not is_last:  # the holder of the lease writes, and this worker writes at its end
                return
            told = read_record(ComparisonResults, out / RESULTS_FILE, PLAN_AGAIN, exact=True)
            if told.runs == results.told(head).runs:
                return
            time.sleep(TURN_SECONDS)
        else:
            return
