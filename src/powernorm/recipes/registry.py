"""All recipes by task and preset."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm.recipes import (
    characters,
    classification,
    entities,
    images,
    language_modeling,
    masked_language_modeling,
    parsing,
    tagging,
    translation,
)
from powernorm.recipes.family import Family, Recipe
from powernorm.training.config import ComparisonConfig

FAMILIES: Final[tuple[Family, ...]] = (
    language_modeling.FAMILY,
    masked_language_modeling.FAMILY,
    tagging.FAMILY,
    translation.FAMILY,
    classification.FAMILY,
    entities.FAMILY,
    parsing.FAMILY,
    images.FAMILY,
    characters.FAMILY,
)
"""In the order in which they are listed."""

RECIPES: Final[Mapping[str, Mapping[str, Recipe]]] = MappingProxyType(
    {family.task: family.presets for family in FAMILIES}
)
"""Recipes by task and preset."""


def family_of(task: str) -> Family:
    """Return the recipes of a task.

    Raises:
        InputError: unknown task; lists the known ones.
    """
    for family in FAMILIES:
        if family.task == task:
            return family
    raise InputError(f"There is no task {task!r}: choose one of {', '.join(RECIPES)}.")


def recipe(task: str, preset: str) -> ComparisonConfig:
    """Return the configuration of a preset.

    Raises:
        InputError: unknown task or preset; lists the known ones.
    """
    presets = family_of(task).presets
    if preset not in presets:
        raise InputError(
            f"The task {task} has no preset {preset!r}: choose one of {', '.join(presets)}."
        )
    return presets[preset]()
