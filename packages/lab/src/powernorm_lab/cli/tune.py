"""`powernorm tune`: tune every norm with the same number of trials, then compare the best."""

from pathlib import Path
from typing import Annotated

import typer

from powernorm_lab.cli import options
from powernorm_lab.cli.compare import (
    built_in_settings,
    named_settings,
    own_goal,
    own_lines,
    parsed_executor_options,
    parsed_goal,
    refuse,
    refuse_goal,
)
from powernorm_lab.cli.ends import end_with_failures, interruptible, results_printed


def tune(
    task: Annotated[str, options.task()],
    norms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Short names (see `powernorm norms`) or your own module:Class; default: the "
            "preset's norms, or ln,bn,rbn,pn.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(metavar="T", help="Trials of each norm; all of them count.")
    ] = 20,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=RANGE",
            help="Range that overrides the recipe's or the norms' range: log:LOW:HIGH, "
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
            help="For comparing the best settings: number of seeds (3: 0 to 2) or list.",
        ),
    ] = None,
    tuning_seed: Annotated[
        int | None,
        typer.Option(
            metavar="S", help="Seed of the trials, none of the comparison's; default: 1000."
        ),
    ] = None,
    data: options.Data = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:max|min",
            help="For your own function: the metric that decides the comparison.",
        ),
    ] = None,
    select_by: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:max|min",
            help="Metric on the valid split that ranks trials; default: the metric that selects "
            "the task's checkpoints, or valid_NAME for the goal test_NAME.",
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune/--no-prune",
            help="Stop trials early that are worse than the median of earlier ones.",
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the tuning; default: runs/tuned-TASK-PRESET or the function's name.",
        ),
    ] = None,
    assignments: options.Assignments = None,
    force: Annotated[bool, options.force("the tuning and the runs")] = False,
    resume: Annotated[
        bool, options.resume("the tuning", ", also with more trials, norms or seeds")
    ] = False,
    device: options.Device = "auto",
    devices: Annotated[int, options.devices(", and multiply --jobs by N")] = 1,
    jobs: options.Jobs = 1,
    num_threads: options.Threads = None,
    executor: options.ExecutorName = None,
    executor_options: options.ExecutorOptions = None,
    retries: options.Retries = 3,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Tune each norm's settings with the same number of trials, then compare the best ones.

    Trials are ranked on the valid split; the best settings of each norm are trained with the
    comparison's seeds and scored on the test split. Output and exit codes are those of `powernorm
    compare`; the report describes the tuning. The same command with --resume continues.
    """
    from powernorm_lab.comparing import notes_of
    from powernorm_lab.engine.executors.choice import Workers
    from powernorm_lab.own_grid import checked_goal
    from powernorm_lab.runs import TRIALS_FOLDER
    from powernorm_lab.tuning.rounds import Budget
    from powernorm_lab.tuning.subjects import builtin_subject, own_subject
    from powernorm_lab.tuning.tuner import tune_and_show
    from powernorm_lab.working import with_threads

    budget = Budget(trials, tuning_seed, prune)
    # Only one process may ask Optuna for trials, so that workers train runs of several processes.
    engine = executor or ("local" if devices > 1 else None)
    workers = Workers(
        jobs, engine, parsed_executor_options(executor_options or []), retries, devices
    )
    judged = (
        None
        if select_by is None
        else checked_goal(
            parsed_goal("--select-by", select_by), "--select-by", "a metric of the valid split"
        )
    )
    changes = assignments or []
    if ":" in task:
        foreign = {"--placement": placement, "--preset": preset, "--data": data}
        refuse(foreign, f"the function {task}")
        folder = out or Path("runs") / f"tuned-{task.replace(':', '-')}"
        subject = own_subject(
            task,
            goal=own_goal(task, goal),
            select_by=judged,
            device=device,
            num_threads=workers.threads(num_threads, folder / TRIALS_FOLDER if resume else None),
            **own_lines(norms, seeds, changes),
        )
    else:
        refuse_goal(goal, task)
        chosen = named_settings(norms, placement, seeds, data, device)
        config, recipe, name = built_in_settings(task, preset, None, [*chosen, *changes])
        folder = out or Path("runs") / f"tuned-{name}"
        resumed = folder / TRIALS_FOLDER if resume else None
        config = with_threads(config, workers, num_threads, resumed)
        subject = builtin_subject(config, notes_of(config, recipe), judged)
    with interruptible(folder), results_printed(folder, as_json=as_json):
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
    end_with_failures(folder)
