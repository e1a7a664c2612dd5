"""Checks of a preset with the user's choices, before anything is trained."""

from collections.abc import Sequence
from pathlib import Path

from powernorm.errors import InputError
from powernorm_lab.data.catalog import SETS, check_known_set
from powernorm_lab.recipes.differences import twin_of
from powernorm_lab.recipes.files import EMBEDDED, Recipe
from powernorm_lab.recipes.papers import recipe_of
from powernorm_lab.runs import placement_words
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import override


def chosen_settings(recipe: Recipe, assignments: Sequence[str]) -> ComparisonSettings:
    """Return the settings of a recipe with the user's assignments, as for `--set`.

    Raises:
        InputError: a setting cannot be used, or `check_choice` refuses the choice.
    """
    # Some settings fit one placement only, so the placement is checked before they are combined.
    for assignment in assignments:
        key, _, value = (part.strip() for part in assignment.partition("="))
        if key == "model.placement":
            _check_placement(recipe, value)
    config = override(recipe.settings, assignments)
    check_choice(config, recipe)
    return config


def check_choice(config: ComparisonSettings, recipe: Recipe | None = None) -> None:
    """Check that settings fit their recipe.

    Args:
        config: settings of the comparison.
        recipe: recipe that they are based on; None finds it by the preset's name.

    Raises:
        InputError: another preset has this placement of the norms, with its own rate and
            penalties; or the preset's files do not exist; or the data set belongs to another task
            or has to be brought by the user.
    """
    own = recipe or recipe_of(config)
    if own is not None:
        _check_placement(own, config.placement)
        _check_files(config, own)
    if config.data.path is not None:
        check_known_set(config.data.path, config.task)


def _check_placement(own: Recipe, placement: str) -> None:
    """Refuse a placement that another preset has, with its own rate and penalties."""
    twin = twin_of(own, placement)
    if twin is not None:
        raise InputError(
            f"model.placement={placement}: the rate and the penalties of the preset {own.name} "
            f"are for {placement_words(own.settings.placement)}; use --preset {twin}"
        )


def _check_files(config: ComparisonSettings, own: Recipe) -> None:
    """Raise an error that names a recipe's files if its default path does not exist."""
    path, needed = config.data.path, own.about.data
    # The name of an embedded or fetched data set is not a file.
    named = [name for name, entry in SETS.items() if entry.home != "own"]
    is_file = path not in (None, *named) and path == own.settings.data.path and needed != EMBEDDED
    if is_file and not Path(str(path)).exists():
        raise InputError(
            f"{path} does not exist: the preset {config.preset} takes files of your own, {needed}"
        )
