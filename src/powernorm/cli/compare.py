"""`powernorm compare` and `recipes`: training, here or in several processes, and its report."""

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from powernorm.cli import launching
from powernorm.data.embedded import EMBEDDED
from powernorm.data.treebanks import TREEBANKS
from powernorm.errors import InputError
from powernorm.recipes import (
    CATALOGUE,
    RECIPES,
    RecipeInfo,
    check_choice,
    recipe,
)
from powernorm.recipes import catalogue as recipe_catalogue
from powernorm.recipes.studies import STUDIES, study_config
from powernorm.recipes.studies.recipes import TASK as STUDIED_TASK
from powernorm.training.config import ComparisonConfig
from powernorm.training.overrides import override

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_HEADINGS: Final = ("preset", "what it is", "data", "cost", "repeats")
_GPU: Final = "GPU: one data-centre GPU; several share the work under torchrun."


def compare(
    task: Annotated[
        str,
        typer.Argument(help=f"What to train: {', '.join(RECIPES)}."),
    ],
    norms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Short names (see `powernorm norms`), module:Class of your own, or labels of the "
            "preset's variants; else the preset's.",
        ),
    ] = None,
    placement: Annotated[
        str | None, typer.Option(metavar="pre|post", help="Where the norms stand.")
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Size of the experiment: {', '.join(RECIPES['lm'])}, or another of "
            "`powernorm recipes`.",
        ),
    ] = "demo",
    study: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Train the variants of a study and draw its figure: "
            + "; ".join(f"{name}: {item.summary}" for name, item in STUDIES.items())
            + ".",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train with seeds 0 … N-1.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A text file, a folder with ….train.txt, ….valid.txt and ….test.txt, or a text "
            f"that comes with powernorm ({', '.join(EMBEDDED)}); for tag CoNLL-U files with "
            f"such names or {', '.join(TREEBANKS)}; for translation a folder with train.de, "
            "train.en, valid.de …, sentence pairs in columns between tabs, or hf:NAME; what the "
            "other tasks take `powernorm data` lists; else the recipe's.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the runs go; else runs/TASK-PRESET or TASK-STUDY-PRESET."
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
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Train every run in N processes, each on a GPU of its own or a part of the CPUs; "
            "over several machines start this command with torchrun instead.",
        ),
    ] = 1,
) -> None:
    """Train the same model with each norm, or with the variants of a study, and compare them.

    Ends in a table and in DIR/report.html.
    """
    folder = out or Path("runs") / "-".join([task, *([study] if study else []), preset])
    options = {
        "norms": norms,
        "model.placement": placement,
        "seeds": None if seeds is None else ",".join(map(str, range(seeds))),
        "data.path": data,
    }
    chosen = [f"{key}={value}" for key, value in options.items() if value is not None]
    chosen += assignments or []
    if study is None:
        config = override(recipe(task, preset), chosen)
    else:
        config = study_config(task, study, preset, chosen)
    check_choice(config)
    with _interruptible(folder):
        if devices > 1:
            raise typer.Exit(_train_in_processes(config, devices))
        _train(config, folder, resume=resume, force=force)


def _train(config: ComparisonConfig, folder: Path, *, resume: bool, force: bool) -> None:
    """Train what a configuration says, print the table and write the page."""
    from rich.console import Console

    # Before the training that takes minutes: a missing extra must not show up after it.
    from powernorm import lab
    from powernorm.report import print_comparison, read_comparison, write_report

    if not launching.is_main():
        lab.compare(config, folder, resume=resume, force=force)
        return
    with lab.ComparisonProgress(Console(stderr=True)) as progress:
        lab.compare(config, folder, resume=resume, force=force, on_event=progress)
    page = write_report(folder)
    print_comparison(Console(), read_comparison(folder))
    typer.echo(f"report: {page}")


def _train_in_processes(config: ComparisonConfig, devices: int) -> int:
    """Start this command again in several processes and return their exit code."""
    if launching.is_launched():
        option = launching.OPTION
        raise InputError(f"{option} and torchrun both start processes: leave {option} out.")
    from powernorm.training.comparison import check_norms

    # Before each process would find it.
    check_norms(config)
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
    """Say after Ctrl-C what is kept and how the work goes on, and leave."""
    try:
        yield
    except KeyboardInterrupt:
        if launching.is_launched():
            pass  # who started this process says it, once
        elif folder.exists():
            typer.echo(
                f"interrupted: {folder} keeps the runs that are over and the last checkpoint; "
                f"go on with: {_resuming_command()}",
                err=True,
            )
        else:
            typer.echo("interrupted: nothing was trained yet; start the command again", err=True)
        raise typer.Exit(launching.INTERRUPTED) from None


def _resuming_command() -> str:
    """Return this command as the one that goes on with what it left."""
    kept = (part for part in sys.argv[1:] if part not in ("--force", "--resume"))
    return f"{shlex.join(['powernorm', *kept])} --resume"


def recipes(
    task: Annotated[
        str | None, typer.Argument(help=f"Only those of {', '.join(RECIPES)}; else all.")
    ] = None,
) -> None:
    """List the presets of `compare` with what they need, cost and repeat."""
    from rich.console import Console
    from rich.text import Text

    chosen = CATALOGUE if task is None else {task: recipe_catalogue.catalogue_of(task)}
    console = Console()
    files = _numbered_files(chosen)
    for name, presets in chosen.items():
        console.print(_recipe_table(name, presets, files))
        console.print()
    for text, number in files.items():
        console.print(Text(f"files {number}: {text}"))
    console.print(Text(_GPU))
    if STUDIED_TASK in chosen:
        _print_studies(console)


def _numbered_files(chosen: Mapping[str, Mapping[str, RecipeInfo]]) -> dict[str, int]:
    """Numbers of what is too long for a cell, in the order in which it is first met."""
    texts = dict.fromkeys(
        info.data
        for presets in chosen.values()
        for info in presets.values()
        if info.data != recipe_catalogue.EMBEDDED
    )
    return {text: number for number, text in enumerate(texts, start=1)}


def _recipe_table(
    task: str, presets: Mapping[str, RecipeInfo], files: Mapping[str, int]
) -> "Table":
    from rich.table import Table
    from rich.text import Text

    # No frame: its strokes would cost the columns that break lines at 80 characters.
    table = Table(
        box=None,
        pad_edge=False,
        title=Text(f"powernorm compare {task} --preset …"),
        title_justify="left",
        title_style="bold",
    )
    for heading in _HEADINGS:
        whole = heading in ("preset", "data")
        table.add_column(heading, overflow="fold", no_wrap=whole)
    for preset, info in presets.items():
        data = f"files {files[info.data]}" if info.data in files else info.data
        table.add_row(*map(Text, (preset, info.summary, data, info.cost, info.source or "-")))
    return table


def _print_studies(console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"\npowernorm compare {STUDIED_TASK} --study …", style="bold"))
    table = Table.grid(padding=(0, 1))
    for study in STUDIES.values():
        table.add_row(Text(study.info.name), Text(study.summary))
    console.print(table)
