"""The list of recipes in the terminal."""

from collections.abc import Mapping
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from powernorm.recipes import CATALOGUE, RecipeInfo, verdict
from powernorm.recipes.catalogue import EMBEDDED, catalogue_of
from powernorm.recipes.studies import STUDIES
from powernorm.recipes.studies.recipes import TASK as STUDIED_TASK

HEADINGS: Final = ("preset", "what it is", "data", "cost", "repeats")
GPU: Final = "GPU: one data-centre GPU; several share the work under torchrun."


def print_recipes(task: str | None) -> None:
    """Prints every preset with what it needs and costs.

    Args:
        task: only those of this one; None is all.

    Raises:
        InputError: unknown task; lists the known ones.
    """
    chosen = CATALOGUE if task is None else {task: catalogue_of(task)}
    console = Console()
    files = _numbered_files(chosen)
    for name, recipes in chosen.items():
        console.print(_table(name, recipes, files))
        console.print()
    for text, number in files.items():
        console.print(Text(f"files {number}: {text}"))
    console.print(Text(GPU))
    if STUDIED_TASK in chosen:
        _print_studies(console)


def _numbered_files(chosen: Mapping[str, Mapping[str, RecipeInfo]]) -> dict[str, int]:
    """Numbers of what is too long for a cell, in the order in which it is first met."""
    texts = dict.fromkeys(
        info.data
        for recipes in chosen.values()
        for info in recipes.values()
        if info.data != EMBEDDED
    )
    return {text: number for number, text in enumerate(texts, start=1)}


def _table(task: str, recipes: Mapping[str, RecipeInfo], files: Mapping[str, int]) -> Table:
    # No frame: its strokes would cost the columns that break lines at 80 characters.
    table = Table(
        box=None,
        pad_edge=False,
        title=Text(f"powernorm compare {task} --preset …"),
        title_justify="left",
        title_style="bold",
    )
    for heading in HEADINGS:
        whole = heading in ("preset", "data")
        table.add_column(heading, overflow="fold", no_wrap=whole)
    for preset, info in recipes.items():
        data = f"files {files[info.data]}" if info.data in files else info.data
        table.add_row(*map(Text, (preset, info.summary, data, info.cost, info.source or "-")))
    return table


def _print_studies(console: Console) -> None:
    console.print(Text(f"\npowernorm compare {STUDIED_TASK} --study …", style="bold"))
    table = Table.grid(padding=(0, 1))
    for study in STUDIES.values():
        table.add_row(Text(study.info.name), Text(study.summary))
    console.print(table)
    console.print(Text(f"\npowernorm compare {verdict.TASK}", style="bold"))
    console.print(Text(verdict.SUMMARY))
