"""What each recipe needs and costs, for `powernorm recipes`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm.recipes.family import EMBEDDED, RecipeInfo
from powernorm.recipes.registry import FAMILIES

__all__ = ["CATALOGUE", "EMBEDDED", "RecipeInfo", "catalogue_of"]

CATALOGUE: Final[Mapping[str, Mapping[str, RecipeInfo]]] = MappingProxyType(
    {family.task: family.catalogue for family in FAMILIES}
)
"""Recipes by task and preset, in the order and with the names of `RECIPES`."""


def catalogue_of(task: str) -> Mapping[str, RecipeInfo]:
    """Return the presets of a task.

    Raises:
        InputError: unknown task; lists the known ones.
    """
    if task not in CATALOGUE:
        raise InputError(f"There is no task {task!r}: choose one of {', '.join(CATALOGUE)}.")
    return CATALOGUE[task]
