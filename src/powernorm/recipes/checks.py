"""Checks of what was chosen of a preset, before anything is trained."""

from pathlib import Path

from powernorm.data.sets.catalogue import SETS, check_known_set
from powernorm.errors import InputError
from powernorm.recipes.catalogue import CATALOGUE, EMBEDDED
from powernorm.recipes.differences import twin_of
from powernorm.recipes.registry import RECIPES
from powernorm.training.config import ComparisonConfig


def check_choice(config: ComparisonConfig) -> None:
    """Check that a configuration is one for which its preset is meant.

    Raises:
        InputError: the norms stand where another preset has them, with its own rate and penalties;
            or the files that the preset asks for are not there; or the data set is of another
            task, or one that the user must bring.
    """
    presets = RECIPES.get(config.task, {})
    if config.study is None and config.preset in presets:
        own = presets[config.preset]()
        _check_placement(config, own)
        _check_files_of_preset(config, own)
    if config.data.path is not None:
        check_known_set(config.data.path, config.task)


def _check_placement(config: ComparisonConfig, own: ComparisonConfig) -> None:
    """Refuse a placement of which another preset knows the rate and the penalties."""
    twin = twin_of(config)
    if twin is not None:
        raise InputError(
            f"model.placement={config.model.placement}: the rate and the penalties of the preset "
            f"{config.preset} are those of {own.model.placement}-norm; use --preset {twin}."
        )


def _check_files_of_preset(config: ComparisonConfig, own: ComparisonConfig) -> None:
    """Say what the files are that a preset takes where they are not at its own path."""
    path, needed = config.data.path, CATALOGUE[config.task][config.preset].data
    # A name of a set that is embedded or fetched is no file.
    named = [name for name, entry in SETS.items() if entry.home != "own"]
    is_file = path not in (None, *named) and path == own.data.path and needed != EMBEDDED
    if is_file and not Path(str(path)).exists():
        raise InputError(
            f"{path} does not exist: the preset {config.preset} takes files of your own, {needed}."
        )
