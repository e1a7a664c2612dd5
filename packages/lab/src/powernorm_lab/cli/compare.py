"""`powernorm compare`: train in this process or several, and write the report."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from powernorm.errors import InputError
from powernorm_lab.cli import launching, options
from powernorm_lab.cli.ends import (
    end_with_failures,
    interruptible,
    results_printed,
    resuming_command,
)
from powernorm_lab.runs import STUDIES, TASKS

if TYPE_CHECKING:
    from powernorm_lab.engine.grid import Race
    from powernorm_lab.recipes import Recipe
    from powernorm_lab.settings.comparison import ComparisonSettings

_GIVEN: Final = "powernorm.given"
"""Key of a command's arguments in its context."""


def compare(
    task: Annotated[
        str,
        options.task(
            " (docs/own-models.md). `powernorm compare lm --help` lists the settings of lm"
        ),
    ],
    norms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Short names (see `powernorm norms`), your own module:Class, or labels of the "
            "preset's variants; default: the preset's norms, or ln,bn,rbn,pn.",
        ),
    ] = None,
    placement: options.Placement = None,
    preset: options.Preset = None,
    study: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Train the variants of a study and draw its figure: " + ", ".join(STUDIES) + "; "
            "`powernorm recipes TASK` lists those of a task.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N | A,B,…", help="Number of seeds (3: 0 to 2) or list (3,7 or 5,)."),
    ] = None,
    data: options.Data = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:max|min",
            help="For your own function: the returned metric that decides, and its better "
            "direction.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the runs; default: runs/TASK-PRESET, TASK-STUDY-PRESET or "
            "MODULE-FUNCTION.",
        ),
    ] = None,
    assignments: options.Assignments = None,
    force: Annotated[bool, options.force("the runs")] = False,
    resume: Annotated[bool, options.resume("the runs")] = False,
    accept_edits: options.AcceptEdits = False,
    device: options.Device = "auto",
    devices: Annotated[
        int,
        options.devices(
            ", and multiply --jobs by N; on several machines start this command with torchrun "
            "instead"
        ),
    ] = 1,
    jobs: options.Jobs = 1,
    num_threads: options.Threads = None,
    executor: options.ExecutorName = None,
    executor_options: options.ExecutorOptions = None,
    retries: options.Retries = 3,
    is_race: Annotated[
        bool,
        typer.Option(
            "--race",
            help="Drop norms that are behind, seed by seed, and stop when it is decided; --seeds "
            "is then the largest number of seeds, at least 3 (docs/race.md).",
        ),
    ] = False,
    race_confidence: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --race: probability that the best norm is not dropped; default: 0.95.",
        ),
    ] = None,
    race_margin: Annotated[
        float | None,
        typer.Option(
            metavar="DIFFERENCE",
            help="With --race: smaller differences of the metric do not matter; the race also "
            "stops when all remaining norms are that close.",
        ),
    ] = None,
    log_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also log every number of a run to a tracker: tensorboard, wandb, mlflow or "
            "trackio; may be given several times.",
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Train nothing: prepare DIR for `powernorm work DIR`, then leave."
        ),
    ] = False,
    as_json: options.AsJson = False,
    wide: options.Wide = False,
    quiet: options.Quiet = False,
) -> None:
    """Train the same model with each norm, or with the variants of a study, and compare them.

    Print a table and write DIR/report.html; the exit code is 1 if runs failed. SIGTERM and SIGUSR1
    stop it after the current step with exit code 75; the same command with --resume continues.
    """
    from powernorm_lab.engine.executors.choice import Workers
    from powernorm_lab.engine.grid_training import compare_grid
    from powernorm_lab.own_grid import own_grid
    from powernorm_lab.working import with_threads

    workers = Workers(
        jobs, executor, parsed_executor_options(executor_options or []), retries, devices
    )
    race = _race(race_confidence, race_margin, is_race=is_race)
    changes = assignments or []
    if ":" in task:
        foreign = {"--placement": placement, "--preset": preset, "--study": study, "--data": data}
        refuse(foreign, f"the function {task}")
        folder = out or Path("runs") / task.replace(":", "-")
        grid = own_grid(
            task,
            goal=own_goal(task, goal),
            device=device,
            num_threads=workers.threads(num_threads, folder if resume else None),
            **own_lines(norms, seeds, changes),
        )
    else:
        refuse_goal(goal, task)
        chosen = named_settings(norms, placement, seeds, data, device)
        config, recipe, name = built_in_settings(task, preset, study, [*chosen, *changes])
        from powernorm_lab.comparing import notes_of
        from powernorm_lab.tasks.builtin import grid_of

        folder = out or Path("runs") / name
        config = with_threads(config, workers, num_threads, folder if resume else None)
        grid = grid_of(config, notes_of(config, recipe))
    grid = replace(grid, race=race, log_to=tuple(log_to or ()))
    if accept_edits:
        if not resume:
            raise InputError("--accept-edits is for existing runs: give --resume, too")
        options.accept_edits(folder)
    if devices > 1 and plan:
        raise InputError(
            f"--plan trains nothing: give {launching.OPTION} {devices} to `powernorm work`"
        )
    with interruptible(folder):
        if plan:
            compare_grid(grid, folder, resume=resume, force=force, plan_only=True)
            typer.echo(f"{folder} is ready; run on every machine: powernorm work {folder}")
            return
        if devices > 1 and not workers.are_used:
            code = _train_in_processes(devices)
            if code:
                raise typer.Exit(code)
        else:
            from powernorm_lab.comparing import compare_and_show

            with results_printed(folder, as_json=as_json):
                compare_and_show(
                    grid,
                    folder,
                    workers=workers,
                    resume=resume,
                    force=force,
                    progress=not quiet,
                    table=not (quiet or as_json),
                    wide=wide,
                )
    if not launching.is_launched():  # else the launching process checks
        end_with_failures(folder, only=[line.folder(seed) for line, seed in grid.runs()])


def named_settings(
    norms: str | None, placement: str | None, seeds: str | None, data: str | None, device: str
) -> list[str]:
    """Return the settings of a built-in task that have their own options, as for `--set`.

    Raises:
        InputError: seeds or device cannot be used.
    """
    values = {
        "norms": norms,
        "model.placement": placement,
        "seeds": None if seeds is None else ",".join(map(str, parsed_seeds(seeds))),
        "data.path": data,
        "training.accelerator": _accelerator_of(device),
    }
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def built_in_settings(
    task: str, preset: str | None, study: str | None, assignments: list[str]
) -> "tuple[ComparisonSettings, Recipe | None, str]":
    """Return the settings of a built-in task, their recipe, and the folder's name.

    Raises:
        InputError: unknown task, recipe or study, or a setting cannot be used.
    """
    from powernorm_lab.recipes import check_choice, chosen_settings, named_recipe, read_recipe
    from powernorm_lab.recipes.studies import study_config

    if task.endswith(".toml"):
        refuse({"--preset": preset, "--study": study}, f"the recipe {task}")
        recipe = read_recipe(Path(task))
        what = chosen_settings(recipe, assignments)
        return what, recipe, f"{what.task}-{recipe.name}"
    name = preset or options.PRESET
    if study is not None:
        what = study_config(task, study, name, assignments)
        check_choice(what)
        return what, None, f"{task}-{study}-{name}"
    recipe = named_recipe(task, name)
    return chosen_settings(recipe, assignments), recipe, f"{task}-{name}"


class CompareCommand(TyperCommand):
    """`compare` with the settings of the task at the end of its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Store the arguments, because the help is shown before they are parsed."""
        ctx.meta[_GIVEN] = tuple(args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the settings of the named task with their defaults."""
        super().format_epilog(ctx, formatter)
        named = [given for given in ctx.meta[_GIVEN] if given in TASKS]
        if not named:
            return
        from powernorm_lab.settings.overrides import explained
        from powernorm_lab.tasks.registry import settings_of

        with formatter.section(f"Settings of {named[0]} for --set, with their defaults"):
            formatter.write_dl(explained(settings_of(named[0])))


def _race(confidence: float | None, margin: float | None, *, is_race: bool) -> "Race | None":
    """Return the rules of the race; None without `--race`."""
    if not is_race:
        options = {"--race-confidence": confidence, "--race-margin": margin}
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise InputError(f"{given[0]} needs --race: give it, too, or leave out {given[0]}")
        return None
    from powernorm_lab.engine.grid import Race

    return Race(margin=margin) if confidence is None else Race(confidence, margin)


def parsed_executor_options(assignments: list[str]) -> dict[str, str]:
    """Return the options of an executor by name."""
    for text in assignments:
        if "=" not in text:
            raise InputError(f"--executor-option {text}: give KEY=VALUE, such as partition=gpu")
    return dict(text.split("=", 1) for text in assignments)


def refuse(given_by_name: Mapping[str, str | None], what: str) -> None:
    """Refuse options that do not apply to what is trained.

    Raises:
        InputError: one of them was given.
    """
    given = [name for name, value in given_by_name.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} cannot be used with {what}: leave it out")


def own_goal(task: str, goal: str | None) -> dict[str, str]:
    """Return the goal of a user's function as an argument of `own_grid`.

    Raises:
        InputError: it is missing, or has no direction.
    """
    if goal is None:
        raise InputError(
            f"{task} needs --goal METRIC:max or METRIC:min: name the returned metric that "
            "decides, and its better direction, e.g. --goal test_loss:min"
        )
    return parsed_goal("--goal", goal)


def parsed_goal(option: str, text: str) -> dict[str, str]:
    """Parse metric and direction, such as `accuracy:max`.

    Raises:
        InputError: one of them is missing.
    """
    metric, _, direction = text.rpartition(":")
    if not metric:
        raise InputError(f"{option} {text}: give METRIC:max or METRIC:min, such as valid_loss:min")
    return {metric: direction}


def refuse_goal(goal: str | None, task: str) -> None:
    """Refuse the goal of a built-in task or a recipe, which has its own.

    Raises:
        InputError: a goal was given, or the task is none of these.
    """
    if task not in TASKS and not task.endswith(".toml"):
        raise InputError(
            f"there is no task {task!r}: choose one of {', '.join(TASKS)}; or give the file of a "
            f"recipe, mine.toml, or a function, {Path(task).stem}:train"
        )
    refuse({"--goal": goal}, f"the built-in task {task}")


def parsed_seeds(text: str) -> list[int]:
    """Parse seeds, either a number such as `3` (0, 1 and 2) or a list such as `3,7`.

    Raises:
        InputError: the text is neither.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and not parts[-1]:
        parts.pop()  # "5," is the seed 5
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    chosen = list(range(numbers[0])) if numbers and "," not in text else numbers
    if not chosen or min(chosen) < 0:
        raise InputError(f"--seeds {text}: give a number of seeds, such as 3, or a list, 3,7")
    return chosen


def _accelerator_of(device: str) -> str | None:
    """Return the accelerator of a built-in task for a device."""
    if device == "auto":
        return None
    if device not in ("cpu", "cuda"):
        raise InputError(
            f"--device {device}: a built-in task trains on auto, cpu or cuda; choose a GPU by "
            "CUDA_VISIBLE_DEVICES"
        )
    return "gpu" if device == "cuda" else "cpu"


def own_lines(norms: str | None, seeds: str | None, assignments: list[str]) -> dict[str, Any]:
    """Return norms, seeds and settings of a user's function as arguments of `own_grid`.

    Raises:
        InputError: a value cannot be used.
    """
    from powernorm_lab.own_grid import NORMS, checked_norms, checked_seeds
    from powernorm_lab.settings.overrides import split_settings

    names = list(NORMS) if norms is None else [name.strip() for name in norms.split(",")]
    settings, norm_options = split_settings(assignments)
    return {
        "norms": checked_norms([name for name in names if name]),
        "seeds": checked_seeds(1 if seeds is None else parsed_seeds(seeds)),
        "settings": settings,
        "norm_options": norm_options,
    }


def _train_in_processes(devices: int) -> int:
    """Run this command in several processes and return their exit code."""
    if launching.is_launched():
        option = launching.OPTION
        raise InputError(f"{option} and torchrun both start processes: leave {option} out")
    return launching.launch(devices, _without_devices(sys.argv[1:]), resuming_command())


def _without_devices(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith(f"{launching.OPTION}="):
            skip = False
        elif argument == launching.OPTION:
            skip = True
        else:
            kept.append(argument)
    return kept
