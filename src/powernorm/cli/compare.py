"""`powernorm compare`: training, here or in several processes, and its report."""

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from powernorm.cli import launching
from powernorm.errors import InputError
from powernorm.lab.tasks import STUDIES, TASKS
from powernorm.runs import RESULTS_FILE

if TYPE_CHECKING:
    from powernorm.lab.engine.executors.choice import Workers
    from powernorm.lab.engine.grid import Grid
    from powernorm.lab.recipes import Recipe
    from powernorm.lab.settings.comparison import ComparisonSettings

_PRESET: Final = "demo"


def compare(
    task: Annotated[
        str,
        typer.Argument(
            help=f"What to train: {', '.join(TASKS)}; mine.toml, a recipe of your own; or "
            "my.module:train, a function of your own (docs/own-models.md). `powernorm compare lm "
            "--help` lists the settings of lm.",
        ),
    ],
    norms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Short names (see `powernorm norms`), module:Class of your own, or labels of the "
            "preset's variants; else the preset's, or ln,bn,rbn,pn.",
        ),
    ] = None,
    placement: Annotated[
        str | None, typer.Option(metavar="pre|post", help="Where the norms stand.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Size of the experiment, also of a study: smoke, demo, or another of `powernorm "
            f"recipes`; else {_PRESET}.",
        ),
    ] = None,
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
        typer.Option(metavar="N | A,B,…", help="How many seeds (3: 0 to 2), or which (3,7 or 5,)."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A text file, a folder with ….train.txt, ….valid.txt and ….test.txt, or the name "
            "of a data set; for tag CoNLL-U files with such names; for translation a folder with "
            "train.de, train.en, valid.de …, sentence pairs in columns between tabs, or hf:NAME; "
            "`powernorm data` lists the sets and what the other tasks take; else the recipe's.",
        ),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:max|min",
            help="Of a function of your own: the value it returns that decides, and which way it "
            "is better.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the runs go; else runs/TASK-PRESET, TASK-STUDY-PRESET or MODULE-FUNCTION.",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting; may be given several times."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Delete the runs that DIR holds first.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the runs that DIR holds.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="auto (a GPU where there is one), cpu, cuda, cuda:1, …"),
    ] = "auto",
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Train every run in N processes, each on a GPU of its own or a part of the CPUs; "
            "with --jobs so many for each of them; over several machines start this command with "
            "torchrun instead.",
        ),
    ] = 1,
    jobs: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Train N runs at a time, each in a process of its own, on a GPU of its own where "
            "there are GPUs; more processes, also of other machines: `powernorm work DIR`.",
        ),
    ] = 1,
    num_threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            metavar="N",
            help="CPU threads of each run, part of its settings; else the recipe's, 1 with --jobs, "
            "or torch's choice.",
        ),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where the processes of --jobs are: local, on this machine; ray, tasks of a Ray "
            "cluster; slurm, jobs of SLURM. All machines have to see DIR.",
        ),
    ] = None,
    executor_options: Annotated[
        list[str] | None,
        typer.Option(
            "--executor-option",
            metavar="KEY=VALUE",
            help="Of ray: address, num_cpus, num_gpus, …; of slurm: partition, timeout_min, … "
            "(docs/scaling.md); may be given several times.",
        ),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="With --jobs: so often a run is tried again whose process was lost.",
        ),
    ] = 3,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Train nothing: prepare DIR for `powernorm work DIR`, then leave."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON in place of the table.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress; with --json only that.")
    ] = False,
) -> None:
    """Train the same model with each norm, or with the variants of a study, and compare them.

    Ends in a table and in DIR/report.html. SIGTERM and SIGUSR1 end it after the step at hand with
    exit code 75; the same command with --resume goes on.
    """
    from powernorm.lab.engine.executors.choice import Workers
    from powernorm.lab.working import with_threads

    shown = Shown(as_json=as_json, quiet=quiet)
    workers = Workers(jobs, executor, _executor_options(executor_options or []), retries, devices)
    recipe: Recipe | None = None
    changes = assignments or []
    if ":" in task:
        foreign = {"--placement": placement, "--preset": preset, "--study": study, "--data": data}
        _refuse(foreign, f"{task} is a function of your own")
        folder = out or Path("runs") / task.replace(":", "-")
        what: Grid | ComparisonSettings = _own(
            task, norms, seeds, goal, changes, device, num_threads or workers.default_threads
        )
    else:
        _refuse({"--goal": goal}, f"{task} has a measure of its own")
        options = {
            "norms": norms,
            "model.placement": placement,
            "seeds": None if seeds is None else ",".join(map(str, _seeds(seeds))),
            "data.path": data,
            "training.accelerator": _accelerator(device),
        }
        chosen = [f"{key}={value}" for key, value in options.items() if value is not None]
        config, recipe, name = _built_in(task, preset, study, [*chosen, *changes])
        what = with_threads(config, workers, num_threads)
        folder = out or Path("runs") / name
    if devices > 1 and plan:
        raise InputError(
            f"--plan trains nothing: give {launching.OPTION} {devices} to `powernorm work`"
        )
    with _interruptible(folder):
        if plan:
            _plan(what, folder, recipe, resume=resume, force=force)
            return
        if devices > 1 and not workers.are_used:
            raise typer.Exit(_train_in_processes(what, devices))
        _train(what, folder, shown, recipe, workers, resume=resume, force=force)


def _built_in(
    task: str, preset: str | None, study: str | None, assignments: list[str]
) -> "tuple[ComparisonSettings, Recipe | None, str]":
    """Return the settings of a built-in task, the recipe they are of, and the folder's name.

    Raises:
        InputError: there is no such task, recipe or study, or a setting cannot be used.
    """
    from powernorm.lab.recipes import check_choice, chosen_settings, named_recipe, read_recipe
    from powernorm.lab.recipes.studies import study_config

    if task.endswith(".toml"):
        _refuse({"--preset": preset, "--study": study}, f"{task} is a recipe of your own")
        recipe = read_recipe(Path(task))
        what = chosen_settings(recipe, assignments)
        return what, recipe, f"{what.task}-{recipe.name}"
    name = preset or _PRESET
    if study is not None:
        what = study_config(task, study, name, assignments)
        check_choice(what)
        return what, None, f"{task}-{study}-{name}"
    recipe = named_recipe(task, name)
    return chosen_settings(recipe, assignments), recipe, f"{task}-{name}"


class CompareCommand(TyperCommand):
    """`compare` with the settings of the task at the end of its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what was given: the help is shown before it is read."""
        ctx.meta["powernorm.given"] = tuple(args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the settings of the task that was named, with their defaults."""
        super().format_epilog(ctx, formatter)
        named = [given for given in ctx.meta["powernorm.given"] if given in TASKS]
        if not named:
            return
        from powernorm.lab.settings.overrides import explained
        from powernorm.lab.tasks.settings import settings_of

        with formatter.section(f"Settings of {named[0]} for --set, with their defaults"):
            formatter.write_dl(explained(settings_of(named[0])))


@dataclass(frozen=True)
class Shown:
    """What the command shows."""

    as_json: bool
    quiet: bool


def _plan(
    what: "Grid | ComparisonSettings",
    folder: Path,
    recipe: "Recipe | None",
    *,
    resume: bool,
    force: bool,
) -> None:
    """Prepare a folder for workers."""
    from powernorm.lab.comparing import notes_of, plan
    from powernorm.lab.settings.comparison import ComparisonSettings

    notes = notes_of(what, recipe) if isinstance(what, ComparisonSettings) else None
    plan(what, folder, resume=resume, force=force, notes=notes)
    typer.echo(f"{folder} is ready; on every machine that sees it: powernorm work {folder}")


def _executor_options(assignments: list[str]) -> dict[str, str]:
    """Return the options of an executor by name."""
    for text in assignments:
        if "=" not in text:
            raise InputError(f"--executor-option {text}: give KEY=VALUE, such as partition=gpu")
    return dict(text.split("=", 1) for text in assignments)


def _refuse(options: Mapping[str, str | None], reason: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InputError(f"{reason}, for which {given[0]} means nothing: leave it out")


def _seeds(text: str) -> list[int]:
    """Return the seeds of `3` (0, 1 and 2) or `3,7`."""
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


def _accelerator(device: str) -> str | None:
    """Return the setting of a built-in task for a device."""
    if device == "auto":
        return None
    if device not in ("cpu", "cuda"):
        raise InputError(
            f"--device {device}: a built-in task trains on auto, cpu or cuda; choose a GPU by "
            "CUDA_VISIBLE_DEVICES"
        )
    return "gpu" if device == "cuda" else "cpu"


def _own(
    task: str,
    norms: str | None,
    seeds: str | None,
    goal: str | None,
    assignments: list[str],
    device: str,
    num_threads: int | None,
) -> "Grid":
    """Return the grid of a function of the user's own."""
    from powernorm.lab.own_grid import NORMS, checked_norms, checked_seeds, own_grid

    metric, _, direction = (goal or "").rpartition(":")
    if not metric:
        raise InputError(
            f"{task} needs --goal METRIC:max or METRIC:min: which of the values that it returns "
            "decides, and which way it is better, e.g. --goal accuracy:max"
        )
    names = list(NORMS) if norms is None else [name.strip() for name in norms.split(",")]
    from powernorm.lab.settings.overrides import split_settings

    settings, norm_options = split_settings(assignments)
    return own_grid(
        task,
        norms=checked_norms([name for name in names if name]),
        seeds=checked_seeds(1 if seeds is None else _seeds(seeds)),
        goal={metric: direction},
        settings=settings,
        norm_options=norm_options,
        device=device,
        num_threads=num_threads,
    )


def _train(
    what: "Grid | ComparisonSettings",
    folder: Path,
    shown: Shown,
    recipe: "Recipe | None",
    workers: "Workers",
    *,
    resume: bool,
    force: bool,
) -> None:
    """Train, print the table and write the page."""
    # Before the training that takes minutes: a missing extra must not show up after it.
    from powernorm.lab.comparing import compare_and_show, notes_of
    from powernorm.lab.settings.comparison import ComparisonSettings

    # What a function of the user's own prints is no part of the JSON.
    with redirect_stdout(sys.stderr) if shown.as_json else nullcontext():
        compare_and_show(
            what,
            folder,
            workers=workers,
            resume=resume,
            force=force,
            progress=not shown.quiet,
            table=not (shown.quiet or shown.as_json),
            notes=notes_of(what, recipe) if isinstance(what, ComparisonSettings) else None,
        )
    if shown.as_json and launching.is_main():
        typer.echo((folder / RESULTS_FILE).read_text(encoding="utf-8"), nl=False)


def _train_in_processes(what: "Grid | ComparisonSettings", devices: int) -> int:
    """Start this command again in several processes and return their exit code."""
    if launching.is_launched():
        option = launching.OPTION
        raise InputError(f"{option} and torchrun both start processes: leave {option} out.")
    from powernorm.lab.settings.comparison import ComparisonSettings
    from powernorm.lab.tasks.builtin import check_norms

    if isinstance(what, ComparisonSettings):
        # Before each process would find it.
        check_norms(what)
    return launching.launch(devices, _without_devices(sys.argv[1:]), _resuming_command())


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


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Say after Ctrl-C or a scheduler's signal what is kept and how it goes on, and leave."""
    try:
        yield
    except KeyboardInterrupt:
        _say_how_to_go_on("interrupted", folder)
        raise typer.Exit(launching.INTERRUPTED) from None
    except BaseException as error:
        from powernorm.lab.engine.stopping import EXIT_CODE, Stopped, ignore_until_exit

        if not isinstance(error, Stopped):
            raise
        ignore_until_exit()
        _say_how_to_go_on(f"stopped ({error})", folder)
        raise typer.Exit(EXIT_CODE) from None


def _say_how_to_go_on(what: str, folder: Path) -> None:
    if launching.is_launched():
        return  # who started this process says it, once
    if folder.exists():
        typer.echo(
            f"{what}: {folder} keeps the runs that are over and the last checkpoint; "
            f"go on with: {_resuming_command()}",
            err=True,
        )
    else:
        typer.echo(f"{what}: nothing was trained yet; start the command again", err=True)


def _resuming_command() -> str:
    """Return this command as the one that goes on with what it left."""
    kept = (part for part in sys.argv[1:] if part not in ("--force", "--resume"))
    return f"{shlex.join(['powernorm', *kept])} --resume"
