"""Definition of studies: functions from the settings of any task to variants."""

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
    """A study of any task: its base settings and variants.

    Variants are made from the user's settings: with `model.num_layers=4` there are five numbers of
    lowest layers.
    """

    info: Study
    summary: str
    """One line for the command line's help."""
    norms: tuple[str, ...]
    """Norms that it trains."""
    variants: Callable[[StudySize, ComparisonSettings], Variants]
    """Function from the settings, including the user's, to the variants."""
    base: Callable[[ComparisonSettings], ComparisonSettings] = _unchanged
    """Function that changes a recipe for all variants, before the user's settings."""
    needs: str = ""
    """Setting of the model that it requires; empty if it applies to every model."""
    varied_options: tuple[str, ...] = ()
    """Options of norms that it varies, removed from the recipe."""
    x_label: Callable[[StudySize, ComparisonSettings], str] | None = None
    """Label of the x axis if it depends on the task."""
    rows: Callable[[StudySize, ComparisonSettings], Mapping[str, str]] = _no_rows
    """Rows of the papers' tables that it repeats, by the labels of variants."""
