"""`powernorm.lab.compare`: norms in a user's training function, or on a built-in task."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from rich.console import Console

from powernorm.errors import InputError
from powernorm.lab.engine.environment import environment
from powernorm.lab.engine.events import Listener
from powernorm.lab.engine.grid import Grid, Line
from powernorm.lab.engine.grid_training import compare_grid
from powernorm.lab.engine.processes import is_first_process, local_rank, num_processes
from powernorm.lab.engine.progress import ComparisonProgress
from powernorm.lab.engine.stopping import Stopped
from powernorm.lab.engine.tasks import Task, TrainingFunction, task_of
from powernorm.lab.recipes import (
    Recipe,
    changes_of,
    measure_of,
    paper_records,
    paper_statistics,
    reduced_note,
)
from powernorm.lab.report import Comparison, print_comparison, read_comparison, write_report
from powernorm.lab.report.measures import MEASURES
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.tasks import builtin
from powernorm.lab.tasks.builtin import Notes
from powernorm.norms.registry import check_norm_options
from powernorm.runs import RESULTS_FILE

NORM_OPTIONS: Final = "norm_options"
NORMS: Final = ("ln", "bn", "rbn", "pn")
Direction = Literal["min", "max"]


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
    if isinstance(train, ComparisonSettings):
        given = {"norms": norms != NORMS, "seeds": seeds != 1, "goal": goal, "settings": settings}
        given |= {"norm_options": norm_options, "device": device != "auto"}
        own = [name for name, value in given.items() if value]
        if own:
            raise InputError(f"{own[0]} is part of a recipe: change it by powernorm.lab.override")
        what: Grid | ComparisonSettings = train
    else:
        what = own_grid(
            train,
            norms=checked_norms(norms),
            seeds=checked_seeds(seeds),
            goal=goal or {},
            settings=settings or {},
            norm_options=norm_options or {},
            device=device,
        )
    try:
        return compare_and_show(
            what,
            Path(out),
            resume=resume,
            force=force,
            progress=on_event or not quiet,
            table=not quiet,
            notes=notes,
        )
    except Stopped as end:
        if is_first_process():
            message = f"stopped ({end}): {out} keeps the runs; go on with resume=True"
            sys.stderr.write(f"{message}\n")
        raise


def compare_and_show(
    what: Grid | ComparisonSettings,
    folder: Path,
    *,
    resume: bool,
    force: bool,
    progress: bool | Listener,
    table: bool,
    notes: Notes | None = None,
) -> Comparison:
    """Train, show what happens, write the page and print the table; see `compare`."""
    train = partial(_train, what, folder, resume=resume, force=force, notes=notes)
    try:
        if callable(progress) or not progress or not is_first_process():
            train(on_event=progress if callable(progress) else None)
        else:
            with ComparisonProgress(Console(stderr=True)) as shown:
                train(on_event=shown)
    except (KeyboardInterrupt, Stopped):
        if is_first_process() and (folder / RESULTS_FILE).exists():
            with suppress(InputError):
                write_report(folder)
        raise
    found = read_comparison(folder)
    if is_first_process():
        page = write_report(folder)
        if table:
            console = Console()
            print_comparison(console, found)
            console.print(f"report: {page}", highlight=False, soft_wrap=True, markup=False)
    return found


def _train(
    what: Grid | ComparisonSettings,
    folder: Path,
    *,
    resume: bool,
    force: bool,
    notes: Notes | None,
    on_event: Listener | None,
) -> None:
    if isinstance(what, ComparisonSettings):
        known = notes or notes_of(what)
        builtin.compare(what, folder, resume=resume, force=force, on_event=on_event, notes=known)
    else:
        compare_grid(what, folder, resume=resume, force=force, on_event=on_event)


def notes_of(config: ComparisonSettings, recipe: Recipe | None = None) -> Notes:
    """Return what is known of a comparison before it is made.

    Args:
        config: of the comparison.
        recipe: it was made of; None means the one of its name.
    """
    measure = measure_of(config.task)
    return Notes(
        measure,
        "max" if MEASURES[measure].higher_is_better else "min",
        tuple(paper_records(config, recipe)),
        reduced_note(config, recipe),
        changes_of(config, recipe),
        tuple(paper_statistics(config, recipe)),
    )


def own_grid(
    train: Task | TrainingFunction | str,
    *,
    norms: Sequence[str],
    seeds: Sequence[int],
    goal: Mapping[str, str],
    settings: Mapping[str, Any],
    norm_options: Mapping[str, Mapping[str, Any]],
    device: str = "auto",
) -> Grid:
    """Return the grid of a training function and of settings, all of them checked.

    Args:
        train: function of a `Run`, a `Task`, or `module:name` of one.
        norms: short names, or `module:Class`.
        seeds: of the runs.
        goal: the metric that decides, and whether it is best at its `max` or `min`.
        settings: values of the function's keyword parameters, or texts of them.
        norm_options: options of `build_norm` by norm.
        device: as in `chosen_device`.

    Raises:
        InputError: one of them cannot be used; the message names it.
    """
    task = task_of(train)
    metric, direction = checked_goal(goal, task.name)
    checked = task.settings(settings)
    for norm in (*norms, *norm_options):
        check_norm_options(norm, norm_options.get(norm, {}))
    unused = [norm for norm in norm_options if norm not in norms]
    if unused:
        raise InputError(
            f"norm_options.{unused[0]} is given, and {unused[0]} is not among the norms "
            f"({', '.join(norms)}): add it, or leave its options out"
        )
    for norm in norms:
        task.check(checked, norm)
    options = {norm: dict(norm_options.get(norm, {})) for norm in norms}
    return Grid(
        task=task,
        lines=[Line(norm=norm, settings=checked, norm_options=options[norm]) for norm in norms],
        seeds=seeds,
        goal=metric,
        direction=direction,
        settings=checked,
        head=partial(_head, task, checked, options, list(seeds)),
        config=partial(_config, task, {"metric": metric, "direction": direction}),
        line_of=partial(_line_of, checked, norm_options),
        device=chosen_device(device),
    )


def chosen_device(device: str) -> torch.device:
    """Return the device of a name; `auto` is a GPU where there is one.

    Raises:
        InputError: torch knows no such device, or it is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if device == "cuda" and torch.cuda.is_available():
            chosen = torch.device("cuda", local_rank() if num_processes() > 1 else 0)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(
            f"device {device!r} cannot be used ({first_line}): try auto or cpu"
        ) from error
    return chosen


def checked_goal(goal: Mapping[str, str], task: str) -> tuple[str, Direction]:
    """Return metric and direction of a goal.

    Raises:
        InputError: there is not exactly one, or its direction is unknown.
    """
    if len(goal) != 1:
        raise InputError(
            f"goal is {goal!r}: name the one value that {task} returns by which the norms are "
            "compared, and which way it is better, e.g. {'valid_loss': 'min'}"
        )
    ((metric, direction),) = goal.items()
    if direction == "min":
        return metric, "min"
    if direction == "max":
        return metric, "max"
    raise InputError(f"the goal {metric} has the direction {direction!r}, expected min or max")


def checked_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds: 0 to n - 1 of a number n.

    Raises:
        InputError: there is none, one is negative or given twice.
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0:
        raise InputError(
            f"seeds is {seeds!r}: give a number of seeds (at least 1), or different seeds from 0"
        )
    return chosen


def checked_norms(norms: Sequence[str]) -> list[str]:
    """Return the norms of a comparison.

    Raises:
        InputError: there is none, or one is given twice.
    """
    chosen = list(norms)
    if isinstance(norms, str) or not chosen or len(set(chosen)) < len(chosen):
        raise InputError(f"norms is {norms!r}: give different short names, such as {list(NORMS)}")
    return chosen


def _head(
    task: Task, settings: Any, options: Mapping[str, Any], seeds: list[int]
) -> dict[str, Any]:
    return {
        "task": task.name,
        "function": task.source(),
        "settings": {
            **task.to_json(settings),
            "norms": list(options),
            "seeds": seeds,
            NORM_OPTIONS: {norm: chosen for norm, chosen in options.items() if chosen},
            **environment(["powernorm"]),
        },
    }


def _config(
    task: Task, goal: Mapping[str, str], line: Line, seed: int, fingerprint: str | None
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "task": task.name,
        "function": task.source(),
        "goal": goal,
        "norm": line.norm,
        "seed": seed,
        NORM_OPTIONS: dict(line.norm_options),
        "settings": task.to_json(line.settings),
    }
    return config if fingerprint is None else {**config, "data_fingerprint": fingerprint}


def _line_of(
    settings: Any,
    norm_options: Mapping[str, Mapping[str, Any]],
    folder: Path,
    old: Mapping[str, Any],
) -> Line:
    """Return the line of a run of an earlier call, also of a norm that is not chosen now."""
    norm = old.get("norm")
    if not isinstance(norm, str):
        raise InputError(f"{folder} is no run of a training function: give another --out")
    chosen = norm_options.get(norm)
    if chosen is None and isinstance(old.get(NORM_OPTIONS), Mapping):
        chosen = old[NORM_OPTIONS]
    return Line(norm=norm, settings=settings, norm_options=dict(chosen or {}))
