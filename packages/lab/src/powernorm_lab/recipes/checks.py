"""Checks of what was chosen of a preset, before anything is trained."""

from collections.abc import Sequence
from pathlib import Path

from powernorm.errors import InputError
from powernorm_lab.data.sets.catalog import SETS, check_known_set
from powernorm_lab.recipes.differences import twin_of
from powernorm_lab.recipes.files import EMBEDDED, Recipe
from powernorm_lab.recipes.papers import recipe_of
from powernorm_lab.runs import placement_words
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import override


def chosen_settings(recipe: Recipe, assignments: Sequence[str]) -> ComparisonSettings:
    """Return the settings of a recipe with those of the user, as `--set` takes them.

    Raises:
        InputError: a setting cannot be used, or `check_choice` refuses the choice.
    """
    # Before the settings are put together, of which some fit one placement alone.
    for assignment in assignments:
        key, _, value = (part.strip() for part in assignment.partition("="))
        if key == "model.placement":
            _check_placement(recipe, value)
    config = override(recipe.settings, assignments)
    check_choice(config, recipe)
    return config


def check_choice(config: ComparisonSettings, recipe: Recipe | None = None) -> None:
    """Check that settings are those for which their recipe is meant.

    Args:
        config: of the comparison.
        recipe: it was made of; None means the one of its name.

    Raises:
        InputError: the norms stand where another preset has them, with its own rate and penalties;
            or the files that the preset asks for are not there; or the data set is of another
            task, or one that the user must bring.
    """
    own = recipe or recipe_of(config)
    if own is not None:
        _check_placement(own, config.placement)
        _check_files(config, own)
    if config.data.path is not None:
        check_known_set(config.data.path, config.task)


def _check_placement(own: Recipe, placement: str) -> None:
    """Refuse a placement of which another preset knows the rate and the penalties."""
    twin = twin_of(own, placement)
    if twin is not None:
        raise InputError(
            f"model.placement={placement}: the rate and the penalties of the preset {own.name} "
            f"are those of {placement_words(own.settings.placement)}; use --preset {twin}"
        )


def _check_files(config: ComparisonSettings, own: Recipe) -> None:
    """Say what the files are that a recipe takes where they are not at its own path."""
    path, needed = config.data.path, own.about.data
    # A name of a set that is embedded or fetched is no file.
    named = [name for name, entry in SETS.items() if entry.home != "own"]
    is_file = path not in (None, *named) and path == own.settings.data.path and needed != EMBEDDED
    if is_file and not Path(str(path)).exists():
        raise InputError(
            f"{path} does not exist: the preset {config.preset} takes files of your own, {needed}"
        )
