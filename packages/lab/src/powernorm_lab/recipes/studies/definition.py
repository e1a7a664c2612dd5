"""What a study is: one function from the settings of any task to its variants."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from powernorm_lab.recipes.studies.sizes import StudySize
from powernorm_lab.settings.comparison import ComparisonSettings, Study, Variant

Variants = tuple[Variant, ...]
NO_ROWS: Final[Mapping[str, str]] = {}


def _unchanged(config: ComparisonSettings) -> ComparisonSettings:
    return config


def _no_rows(size: StudySize, config: ComparisonSettings) -> Mapping[str, str]:
    del size, config
    return NO_ROWS


@dataclass(frozen=True)
class StudyRecipe:
    """A study: what is varied, of whatever task.

    Variants are made after the user's settings, so that these are what is varied: with
    `model.num_layers=4` there are five numbers of lowest layers.
    """

    info: Study
    summary: str
    """One line for the command line's help."""
    norms: tuple[str, ...]
    """That it trains."""
    variants: Callable[[StudySize, ComparisonSettings], Variants]
    """What is trained, given the configuration with the user's settings."""
    base: Callable[[ComparisonSettings], ComparisonSettings] = _unchanged
    """What it changes in a recipe for all variants, before the user's settings."""
    needs: str = ""
    """Setting of the model without which it has no meaning; empty where every model will do."""
    varied_options: tuple[str, ...] = ()
    """Options of norms that it varies, which a recipe's own values would only hide."""
    x_label: Callable[[StudySize, ComparisonSettings], str] | None = None
    """Of the x axis, where that depends on the task."""
    rows: Callable[[StudySize, ComparisonSettings], Mapping[str, str]] = _no_rows
    """By label of a variant, the row of the papers' tables that it repeats."""
