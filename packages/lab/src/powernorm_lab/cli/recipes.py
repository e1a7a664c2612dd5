"""`powernorm recipes`: list presets and studies with their data, costs and sources."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from powernorm.errors import InputError
from powernorm_lab.runs import TASKS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from powernorm_lab.recipes import Recipe

_GPU: Final = "GPU: one data-center GPU; several share the work under torchrun."


def recipes(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK|show]",
            help=f"Only the presets of {', '.join(TASKS)}; `show NAME` prints one; default: all.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="After show: TASK/NAME, or NAME if it is unique."),
    ] = None,
) -> None:
    """List the presets of `compare` with their data, costs and sources, or print one."""
    from powernorm_lab.recipes import find_recipe, recipes_of

    if what == "show":
        if name is None:
            raise InputError("recipes show needs a name: `powernorm recipes` lists them")
        path = find_recipe(name)
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
        _print_statistics(path)
        return
    if name is not None:
        raise InputError(f"recipes {what} {name}: write `powernorm recipes show {name}`")
    from rich.console import Console
    from rich.text import Text

    chosen = {task: recipes_of(task) for task in (TASKS if what is None else [what])}
    console = Console()
    files = _numbered_files(chosen)
    for task, presets in chosen.items():
        console.print(_recipe_table(task, presets, files))
        console.print()
    for text, number in files.items():
        console.print(Text(f"files {number}: {text}"))
    console.print(Text(_GPU))
    _print_studies(console, chosen)


def _print_statistics(path: Path) -> None:
    """Print the published statistics of a recipe's norms as comments of its file."""
    from powernorm_lab.recipes import paper_statistics, read_recipe
    from powernorm_lab.report.paper_tables import statistic_label
    from powernorm_lab.runs import placement_words

    recipe = read_recipe(path)
    rows: dict[tuple[str, str, str], dict[str, float]] = {}
    for one in paper_statistics(recipe.settings, recipe):
        row = rows.setdefault((one["dataset"], statistic_label(one), one["source"]), {})
        row[one["norm"]] = one["value"]
    last = ""
    for (dataset, label, source), values in rows.items():
        if dataset != last:
            norms = "".join(f"{norm:>7}" for norm in values)
            title = f"Also printed, {placement_words(recipe.settings.placement)}, {dataset}:"
            typer.echo(f"\n# {title:<46}{norms}")
            last = dataset
        numbers = "".join(f"{value:7.1f}" for value in values.values())
        typer.echo(f"# {label:<46}{numbers}  {source}")


def _numbered_files(chosen: "Mapping[str, Mapping[str, Recipe]]") -> dict[str, int]:
    """Number the descriptions of files, which are too long for a cell, in order of appearance."""
    from powernorm_lab.recipes.files import EMBEDDED

    texts = dict.fromkeys(
        recipe.about.data
        for presets in chosen.values()
        for recipe in presets.values()
        if recipe.about.data != EMBEDDED
    )
    return {text: number for number, text in enumerate(texts, start=1)}


def _recipe_table(task: str, presets: "Mapping[str, Recipe]", files: Mapping[str, int]) -> "Table":
    """Return two lines a preset: what it is, then data, cost and source."""
    from rich.table import Table
    from rich.text import Text

    # A frame would take columns, so that lines would break at 80 characters.
    table = Table(
        box=None,
        pad_edge=False,
        show_header=False,
        title=Text(f"powernorm compare {task} --preset …"),
        title_justify="left",
        title_style="bold",
    )
    table.add_column(no_wrap=True)
    table.add_column()
    for preset, recipe in presets.items():
        about = recipe.about
        data = f"files {files[about.data]}" if about.data in files else about.data
        facts = [about.cost, data, *([about.source] if about.source else [])]
        table.add_row(Text(preset), Text(about.summary))
        table.add_row("", Text("; ".join(facts), style="dim"))
    return table


def _print_studies(console: "Console", chosen: Iterable[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from powernorm_lab.recipes.studies import STUDIES, tasks_of

    tasks = list(chosen)
    one = tasks[0] if len(tasks) == 1 else None
    console.print(Text(f"\npowernorm compare {one or 'TASK'} --study …", style="bold"))
    console.print(Text("With any preset of the task; --preset full for studies of a paper."))
    table = Table.grid(padding=(0, 1))
    for name, study in STUDIES.items():
        known = [task for task in tasks_of(name) if task in tasks]
        if known:
            others = "" if one or len(known) == len(tasks) else f"; {', '.join(known)}"
            table.add_row(Text(name), Text(study.summary + others))
    console.print(table)
