"""`powernorm_lab.compare`: compare norms with a training function or on a built-in task."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from powernorm.errors import InputError
from powernorm_lab.engine.events import Listener
from powernorm_lab.engine.executors.choice import Workers
from powernorm_lab.engine.folders import READ_ANEW, write_json
from powernorm_lab.engine.grid import Grid, Race
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.engine.leases import Lease, LeaseHeldError
from powernorm_lab.engine.processes import is_first_process
from powernorm_lab.engine.progress import ComparisonProgress
from powernorm_lab.engine.stopping import Stop, Stopped
from powernorm_lab.engine.tasks import Task, TrainingFunction
from powernorm_lab.own_grid import NORMS, Direction, checked_norms, checked_seeds, own_grid
from powernorm_lab.recipes import (
    Recipe,
    changes_of,
    measure_of,
    paper_records,
    paper_statistics,
    reduced_note,
)
from powernorm_lab.report import (
    Comparison,
    print_comparison,
    read_comparison,
    seed_records,
    write_report,
)
from powernorm_lab.report.measures import goal_of
from powernorm_lab.runs import RESULTS_FILE, ComparisonResults
from powernorm_lab.schema import read_record, written
from powernorm_lab.settings.comparison import ComparisonSettings, Notes
from powernorm_lab.working import with_threads

LEASE_SECONDS: Final = 10.0
"""Longest time in seconds that a worker holds the folder's lease to write results.json."""


def compare(
    train: Task | TrainingFunction | str | ComparisonSettings,
    out: str | Path,
    *,
    norms: Sequence[str] = NORMS,
    seeds: int | Sequence[int] = 1,
    goal: Mapping[str, Direction] | None = None,
    settings: Mapping[str, Any] | None = None,
    norm_options: Mapping[str, Mapping[str, Any]] | None = None,
    device: str = "auto",
    jobs: int = 1,
    num_threads: int | None = None,
    executor: str | None = None,
    executor_options: Mapping[str, str] | None = None,
    devices: int = 1,
    retries: int = 3,
    race: Race | None = None,
    log_to: Sequence[str] = (),
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
    on_event: Listener | None = None,
    notes: Notes | None = None,
) -> Comparison:
    """Train the same model with every norm and seed, and compare the results.

    `out` receives a folder for each run, `comparison.json`, `results.json` (rewritten after every
    run) and `report.html`. A run that fails, or whose loss becomes NaN, is marked, and the other
    runs are still trained. SIGTERM and SIGUSR1 stop the current run after its step, with a
    checkpoint.

    Args:
        train: function of a `Run` that trains and returns metrics, with its settings as keyword
            parameters with defaults; its `module:name`; a `Task`; or a recipe of a built-in task,
            which includes norms, seeds and settings.
        out: folder of the comparison.
        norms: short names, or `module:Class`.
        seeds: number of seeds (0 to n - 1), or list of seeds.
        goal: metric that decides, with its better direction `max` or `min`, such as
            `{"accuracy": "max"}`; required for a function.
        settings: values of the function's keyword parameters; the others have their defaults.
        norm_options: options of `build_norm` by norm, such as `{"rbn": {"mean_penalty": 1.0}}`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, …
        jobs: number of runs at a time, each in its own process and, if there are GPUs, on its own
            GPU; a function has to be at the top level of a module or script, which the processes
            import (a script needs `if __name__ == "__main__":` around the call).
        num_threads: CPU threads of each run, part of its settings; None is 1 with `jobs` or an
            executor, else torch's default.
        executor: place of the processes of `jobs`: `local`, on this machine; `ray`, tasks of a Ray
            cluster; `slurm`, jobs of SLURM. All machines need access to `out`.
        executor_options: options of `ray` or `slurm`; see RayExecutor and SlurmExecutor.
        devices: number of processes that train each run together, each on its own GPU or with
            `num_threads` CPU threads; `jobs` multiplies it.
        retries: with `jobs`, how often a run is retried after its process was lost.
        race: rule for dropping norms that are behind, seed by seed, until the race is decided;
            `seeds` is then the largest number of seeds, at least three. None trains every norm with
            every seed.
        log_to: trackers that also receive every number of a run: `tensorboard`, `wandb`, `mlflow`,
            `trackio`.
        resume: keep finished runs, and continue interrupted runs from their last checkpoints,
            exactly as if they had not been interrupted.
        force: delete existing runs in `out` first.
        quiet: show no progress and no table.
        on_event: function that receives events; it replaces the progress display.
        notes: caveats and published results for `results.json`; None takes them from the recipe.

    Returns:
        The comparison, read from `out`.

    Raises:
        InputError: an argument cannot be used, or another process trains in `out`.
        KeyboardInterrupt: after the current run has been marked as interrupted.
        SystemExit: the same after SIGTERM or SIGUSR1, with the exit code 75.

    Distributed:
        Under `torchrun` every process calls it and the function. The first one writes the files, in
        a folder that all can read.
    """
    if devices > 1:
        executor = executor or "local"
    workers = Workers(jobs, executor, executor_options or {}, retries, devices)
    resumed = Path(out) if resume else None
    if isinstance(train, ComparisonSettings):
        given = {"norms": norms != NORMS, "seeds": seeds != 1, "goal": goal, "settings": settings}
        given |= {"norm_options": norm_options, "device": device != "auto"}
        own = [name for name, value in given.items() if value]
        if own:
            raise InputError(f"{own[0]} is part of a recipe: change it by powernorm_lab.override")
        from powernorm_lab.tasks.builtin import grid_of  # not imported for a function

        config = with_threads(train, workers, num_threads, resumed)
        grid = grid_of(config, notes or notes_of(train))
    else:
        grid = own_grid(
            train,
            norms=checked_norms(norms),
            seeds=checked_seeds(seeds),
            goal=goal or {},
            settings=settings or {},
            norm_options=norm_options or {},
            device=device,
            num_threads=workers.threads(num_threads, resumed),
        )
    grid = replace(grid, race=race, log_to=tuple(log_to))
    try:
        return compare_and_show(
            grid,
            Path(out),
            workers=workers,
            resume=resume,
            force=force,
            progress=on_event or not quiet,
            table=not quiet,
        )
    except Stopped as end:
        if is_first_process():
            message = f"stopped ({end}): {out} keeps the runs; continue them with resume=True"
            sys.stderr.write(f"{message}\n")
        raise


def compare_and_show(
    grid: Grid,
    folder: Path,
    *,
    workers: Workers,
    resume: bool,
    force: bool,
    progress: bool | Listener,
    table: bool,
    wide: bool = False,
) -> Comparison:
    """Train with a progress display, write the page and print the table; see `compare`."""
    stop = Stop()
    with stop.watching():
        try:
            executor = workers.start_executor(folder, grid) if workers.are_used else None
            stop.install()  # again, because Ray installs handlers of its own
        except Stopped:
            raise
        except SystemExit as end:  # raised by Ray's handler of SIGTERM
            raise Stopped from end
        try:
            with shown(folder, progress) as listener:
                compare_grid(
                    grid,
                    folder,
                    resume=resume,
                    force=force,
                    on_event=listener,
                    executor=executor,
                )
        finally:
            if executor is not None:
                executor.close()
    return show_comparison(folder, table=table, wide=wide)


@contextmanager
def shown(folder: Path, progress: bool | Listener) -> Iterator[Listener | None]:
    """Show the progress of the block; if it is interrupted, write the page of the runs so far.

    Args:
        folder: folder of the comparison.
        progress: whether to show it, or a function that receives the events.
    """
    try:
        if callable(progress) or not progress or not is_first_process():
            yield progress if callable(progress) else None
        else:
            with ComparisonProgress(Console(stderr=True)) as bars:
                yield bars
    except (KeyboardInterrupt, Stopped):
        if is_first_process() and (folder / RESULTS_FILE).exists():
            with suppress(InputError):
                write_report([folder])
        raise


def show_comparison(folder: Path, *, table: bool, wide: bool = False) -> Comparison:
    """Write the page of a comparison, print its table, and return it."""
    found = read_comparison(folder)
    if is_first_process():
        _add_statistics(folder, found)
        page = write_report([folder])
        if table:
            console = Console()
            print_comparison(console, found, wide=wide)
            console.print(f"report: {page}", highlight=False, soft_wrap=True, markup=False)
    return found


def _add_statistics(folder: Path, comparison: Comparison) -> None:
    """Write the statistics over seeds into results.json."""
    lease = _lease_of(folder)
    try:
        with lease.writing():
            path = folder / RESULTS_FILE
            results = read_record(ComparisonResults, path, READ_ANEW, exact=True)
            results = replace(results, statistics=seed_records(comparison))
            write_json(path, written(results))
    finally:
        lease.release(forget=True)


def _lease_of(folder: Path) -> Lease:
    """Acquire a folder's lease; a worker that was started by hand may hold it for a moment."""
    deadline = time.monotonic() + LEASE_SECONDS
    while True:
        try:
            return Lease(folder)
        except LeaseHeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LEASE_SECONDS / 100)


def notes_of(config: ComparisonSettings, recipe: Recipe | None = None) -> Notes:
    """Return main metric, published results and caveats of a comparison before it is trained.

    Args:
        config: settings of the comparison.
        recipe: recipe that they are based on; None finds it by the preset's name.
    """
    return Notes(
        goal_of(measure_of(config.task)),
        tuple(paper_records(config, recipe)),
        reduced_note(config, recipe),
        changes_of(config, recipe),
        tuple(paper_statistics(config, recipe)),
    )
