"""All recipes by task and preset."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm.recipes import language_modeling, masked_language_modeling, tagging, translation
from powernorm.training.config import ComparisonConfig

Recipe = Callable[[], ComparisonConfig]

RECIPES: Final[Mapping[str, Mapping[str, Recipe]]] = MappingProxyType(
    {
        "lm": MappingProxyType(language_modeling.PRESETS),
        "mlm": MappingProxyType(masked_language_modeling.PRESETS),
        "tag": MappingProxyType(tagging.PRESETS),
        "translation": MappingProxyType(translation.PRESETS),
    }
)
"""Recipes by task and preset."""


def recipe(task: str, preset: str) -> ComparisonConfig:
    """Return the configuration of a preset.

    Raises:
        InputError: unknown task or preset; lists the known ones.
    """
    if task not in RECIPES:
        raise InputError(f"There is no task {task!r}: choose one of {', '.join(RECIPES)}.")
    presets = RECIPES[task]
    if preset not in presets:
        raise InputError(
            f"The task {task} has no preset {preset!r}: choose one of {', '.join(presets)}."
        )
    return presets[preset]()
