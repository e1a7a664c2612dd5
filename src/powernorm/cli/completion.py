"""What a shell offers after the Tab key, beside the names of commands and options."""

from collections.abc import Iterable
from typing import Final

import typer

from powernorm.runs import STUDIES, TASKS

GIVEN: Final = "powernorm.given"
"""In the context of a command, the words after it."""


def tasks(incomplete: str) -> list[str]:
    """Return the tasks that begin so."""
    return _beginning(TASKS, incomplete)


def studies(incomplete: str) -> list[str]:
    """Return the studies that begin so."""
    return _beginning(STUDIES, incomplete)


def presets(context: typer.Context, incomplete: str) -> list[str]:
    """Return the presets of the task on the line that begin so, or of all tasks."""
    from powernorm.lab.recipes import paths_of

    named = [word for word in context.meta.get(GIVEN, ()) if word in TASKS]
    return _beginning({name for task in named or TASKS for name in paths_of(task)}, incomplete)


def data_sets(context: typer.Context, incomplete: str) -> list[str]:
    """Return the data sets that begin so and that the command takes."""
    from powernorm.lab.data.sets.catalog import SETS

    homes = ("embedded", "fetched") if context.info_name == "where" else ("fetched",)
    return _beginning([name for name, entry in SETS.items() if entry.home in homes], incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
