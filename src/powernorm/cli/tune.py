"""`powernorm tune`: the same budget of trials for every norm, then the comparison of the best."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powernorm.cli import options
from powernorm.cli.compare import (
    built_in_settings,
    named_settings,
    parsed_executor_options,
    parsed_seeds,
    refuse,
)
from powernorm.cli.ends import end_with_failures, interruptible
from powernorm.errors import InputError
from powernorm.runs import RESULTS_FILE, TASKS

if TYPE_CHECKING:
    from powernorm.lab.engine.executors.choice import Workers
    from powernorm.lab.tuning.subjects import Subject
    from powernorm.runs import Goal


def tune(
    task: Annotated[
        str,
        typer.Argument(
            help=f"What to train: {', '.join(TASKS)}; mine.toml, a recipe of your own; or "
            "my.module:train, a function of your own.",
        ),
    ],
    norms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Short names (see `powernorm norms`) or module:Class of your own; else the "
            "preset's, or ln,bn,rbn,pn.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(metavar="T", help="Trials of each norm; all of them count.")
    ] = 20,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=RANGE",
            help="A range over those that the recipe and the norms have: log:LOW:HIGH, "
            "linear:LOW:HIGH, int:LOW:HIGH, choice:A,B,…, or fixed; KEY as in --set, or "
            "norm_options.NORM.OPTION; may be given several times.",
        ),
    ] = None,
    placement: options.Placement = None,
    preset: options.Preset = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N | A,B,…",
            help="Of the comparison of the best settings: how many seeds (3: 0 to 2), or which.",
        ),
    ] = None,
    tuning_seed: Annotated[
        int | None,
        typer.Option(metavar="S", help="Of the trials, none of the comparison's seeds; else 1000."),
    ] = None,
    data: options.Data = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:max|min",
            help="Of a function of your own: the value that the comparison is about.",
        ),
    ] = None,
    select_by: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:max|min",
            help="The value of the valid split by which trials are judged; else what the task "
            "chooses checkpoints by, or valid_NAME for the goal test_NAME.",
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune/--no-prune",
            help="End trials early that are worse than the median of the earlier ones.",
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where all goes; else runs/tuned-TASK-PRESET or the function's name.",
        ),
    ] = None,
    assignments: options.Assignments = None,
    force: Annotated[
        bool, typer.Option("--force", help="Delete the tuning and the runs that DIR holds first.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the tuning that DIR holds, also with more trials, norms or seeds.",
        ),
    ] = False,
    device: options.Device = "auto",
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Train every run in N processes, each on a GPU of its own or a part of the CPUs; "
            "with --jobs so many for each of them.",
        ),
    ] = 1,
    jobs: options.Jobs = 1,
    num_threads: options.Threads = None,
    executor: options.ExecutorName = None,
    executor_options: options.ExecutorOptions = None,
    retries: options.Retries = 3,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Choose each norm's settings by the same number of trials, then compare the best ones.

    Trials are judged on the valid split; the best settings of each norm are trained with the
    comparison's seeds and scored on the test split. Ends as `powernorm compare` does; the report
    says how each number was tuned. The same command with --resume goes on.
    """
    from powernorm.lab.engine.executors.choice import Workers
    from powernorm.lab.tuning.rounds import Budget
    from powernorm.lab.tuning.tuner import tune_and_show

    budget = Budget(trials, tuning_seed, prune)
    # What asks for the trials stays one process: runs of several are a worker's.
    engine = executor or ("local" if devices > 1 else None)
    workers = Workers(
        jobs, engine, parsed_executor_options(executor_options or []), retries, devices
    )
    judged = None if select_by is None else _goal("--select-by", select_by)
    if ":" in task:
        foreign = {"--placement": placement, "--preset": preset, "--data": data}
        refuse(foreign, f"{task} is a function of your own")
        folder = out or Path("runs") / f"tuned-{task.replace(':', '-')}"
        subject = _own(
            task,
            norms,
            seeds,
            goal,
            judged,
            assignments or [],
            device,
            workers.threads(num_threads),
        )
    else:
        refuse({"--goal": goal}, f"{task} has a measure of its own")
        chosen = named_settings(norms, placement, seeds, data, device)
        changes = [*chosen, *(assignments or [])]
        subject, name = _built_in(task, preset, changes, judged, workers, num_threads)
        folder = out or Path("runs") / f"tuned-{name}"
    with interruptible(folder), redirect_stdout(sys.stderr) if as_json else nullcontext():
        tune_and_show(
            subject,
            folder,
            budget,
            search or [],
            workers=workers,
            resume=resume,
            force=force,
            progress=not quiet,
            table=not (quiet or as_json),
        )
    if as_json:
        typer.echo((folder / RESULTS_FILE).read_text(encoding="utf-8"), nl=False)
    end_with_failures(folder)


def _built_in(
    task: str,
    preset: str | None,
    assignments: list[str],
    judged: "Goal | None",
    workers: "Workers",
    num_threads: int | None,
) -> "tuple[Subject, str]":
    """Return a recipe of a built-in task, and the name of its folder."""
    from powernorm.lab.comparing import notes_of
    from powernorm.lab.tuning.subjects import BuiltinSubject
    from powernorm.lab.working import with_threads

    config, recipe, name = built_in_settings(task, preset, None, assignments)
    notes = notes_of(config, recipe)
    return BuiltinSubject(with_threads(config, workers, num_threads), notes, judged), name


def _own(
    task: str,
    norms: str | None,
    seeds: str | None,
    goal: str | None,
    judged: "Goal | None",
    assignments: list[str],
    device: str,
    num_threads: int | None,
) -> "Subject":
    """Return a function of the user's own."""
    from powernorm.lab.own_grid import NORMS, checked_norms, checked_seeds
    from powernorm.lab.settings.overrides import split_settings
    from powernorm.lab.tuning.subjects import OwnSubject

    if goal is None:
        raise InputError(
            f"{task} needs --goal METRIC:max or METRIC:min: which of the values that it returns "
            "the comparison is about, e.g. --goal test_accuracy:max"
        )
    decides = _goal("--goal", goal)
    names = list(NORMS) if norms is None else [name.strip() for name in norms.split(",")]
    settings, norm_options = split_settings(assignments)
    return OwnSubject(
        task,
        norms=checked_norms([name for name in names if name]),
        seeds=checked_seeds(1 if seeds is None else parsed_seeds(seeds)),
        goal={decides["metric"]: decides["direction"]},
        select_by=judged,
        settings=settings,
        norm_options=norm_options,
        device=device,
        num_threads=num_threads,
    )


def _goal(option: str, text: str) -> "Goal":
    """Return metric and direction of `accuracy:max`."""
    from powernorm.runs import Goal

    metric, _, direction = text.rpartition(":")
    if metric and direction == "max":
        return Goal(metric=metric, direction="max")
    if metric and direction == "min":
        return Goal(metric=metric, direction="min")
    raise InputError(f"{option} {text}: give METRIC:max or METRIC:min, such as valid_loss:min")
