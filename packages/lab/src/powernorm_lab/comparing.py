"""`powernorm_lab.compare`: norms in a user's training function, or on a built-in task."""

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
"""A worker that writes results.json has its lease for less."""


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
    """Train the same thing with every norm and seed, and compare what came of it.

    `out` receives a folder for each run, `comparison.json`, `results.json` (rewritten after every
    run) and `report.html`. A run whose loss becomes NaN, or that fails, is marked so, and the
    others go on. SIGTERM and SIGUSR1 end the run at hand after its step, with a checkpoint.

    Args:
        train: function of a `Run` that trains and returns metrics, with its settings as keyword
            parameters with defaults; `module:name` of one; a `Task`; or a recipe of a built-in
            task, which has norms, seeds and settings of its own.
        out: folder of the comparison.
        norms: short names, or `module:Class`.
        seeds: how many (0 to n - 1), or which.
        goal: the one metric that decides, with `max` or `min` for which way it is better, such as
            `{"accuracy": "max"}`; needed for a function.
        settings: values of the function's keyword parameters; the others have their defaults.
        norm_options: options of `build_norm` by norm, such as `{"rbn": {"mean_penalty": 1.0}}`.
        device: `auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, …
        jobs: runs at a time, each in a process of its own, on a GPU of its own where there are
            GPUs; a function has to be at the top level of a module or script, which the processes
            import (a script needs `if __name__ == "__main__":` around the call).
        num_threads: CPU threads of each run, part of its settings; None is 1 with `jobs` or an
            executor, else torch's choice.
        executor: where the processes of `jobs` are: `local`, on this machine; `ray`, tasks of a Ray
            cluster; `slurm`, jobs of SLURM. All machines have to see `out`.
        executor_options: of `ray` or `slurm`; see RayExecutor and SlurmExecutor.
        devices: processes that train each run together, each on a GPU of its own or with
            `num_threads` CPU threads; `jobs` times so many are at work.
        retries: with `jobs`, so often a run is tried again whose process was lost.
        race: drop norms that are behind, seed by seed, and stop when it is decided; `seeds` is then
            how many there are at most, three at least. None trains every norm with every seed.
        log_to: trackers that show every number of a run, too: `tensorboard`, `wandb`, `mlflow`,
            `trackio`.
        resume: leave runs that are over as they are, and go on with interrupted ones from their
            last checkpoint, exactly as if they had not been interrupted.
        force: delete the runs that `out` holds first.
        quiet: show no progress and no table.
        on_event: is called with what happens, in place of the progress that is shown.
        notes: of a recipe: what `results.json` says beside what was measured; else what is known.

    Returns:
        What was read back from `out`.

    Raises:
        InputError: something given cannot be used, or another process trains in `out`.
        KeyboardInterrupt: after the run at hand has been marked as interrupted.
        SystemExit: the same after SIGTERM or SIGUSR1, with the exit code 75.

    Distributed:
        Under `torchrun` every process calls it and the function; the first one writes the files,
        in a folder that all can read.
    """
    if devices > 1:
        executor = executor or "local"
    workers = Workers(jobs, executor, executor_options or {}, retries, devices)
    if isinstance(train, ComparisonSettings):
        given = {"norms": norms != NORMS, "seeds": seeds != 1, "goal": goal, "settings": settings}
        given |= {"norm_options": norm_options, "device": device != "auto"}
        own = [name for name, value in given.items() if value]
        if own:
            raise InputError(f"{own[0]} is part of a recipe: change it by powernorm_lab.override")
        from powernorm_lab.tasks.builtin import grid_of  # a function needs none of it

        grid = grid_of(with_threads(train, workers, num_threads), notes or notes_of(train))
    else:
        grid = own_grid(
            train,
            norms=checked_norms(norms),
            seeds=checked_seeds(seeds),
            goal=goal or {},
            settings=settings or {},
            norm_options=norm_options or {},
            device=device,
            num_threads=workers.threads(num_threads),
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
            message = f"stopped ({end}): {out} keeps the runs; go on with resume=True"
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
    """Train, show what happens, write the page and print the table; see `compare`."""
    stop = Stop()
    with stop.watching():
        try:
            executor = workers.start_executor(folder, grid) if workers.are_used else None
            stop.install()  # Ray takes the signals, too
        except Stopped:
            raise
        except SystemExit as end:  # of Ray's handler of SIGTERM
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
    """Show what happens in the block, and write the page of what there is if it is interrupted.

    Args:
        folder: of the comparison.
        progress: whether to show it, or who receives the events.
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
                write_report(folder)
        raise


def show_comparison(folder: Path, *, table: bool, wide: bool = False) -> Comparison:
    """Write the page of a comparison, print its table, and return it."""
    found = read_comparison(folder)
    if is_first_process():
        _add_statistics(folder, found)
        page = write_report(folder)
        if table:
            console = Console()
            print_comparison(console, found, wide=wide)
            console.print(f"report: {page}", highlight=False, soft_wrap=True, markup=False)
    return found


def _add_statistics(folder: Path, comparison: Comparison) -> None:
    """Write into results.json what the seeds say."""
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
    """Take a folder's lease; a worker that was started by hand may have it for a moment."""
    deadline = time.monotonic() + LEASE_SECONDS
    while True:
        try:
            return Lease(folder)
        except LeaseHeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LEASE_SECONDS / 100)


def notes_of(config: ComparisonSettings, recipe: Recipe | None = None) -> Notes:
    """Return what is known of a comparison before it is made.

    Args:
        config: of the comparison.
        recipe: it was made of; None means the one of its name.
    """
    return Notes(
        goal_of(measure_of(config.task)),
        tuple(paper_records(config, recipe)),
        reduced_note(config, recipe),
        changes_of(config, recipe),
        tuple(paper_statistics(config, recipe)),
    )
