"""Base settings of a task's studies: a recipe of the task, or a preset in its `studies.toml`.

    rows = "sentences"              # unit of data.batch_size; absent: segments of tokens
    penalty_unit = "data.batch_size"    # setting that multiplies λ in norm_options; absent: 1

    [demo.all]                      # the preset demo of every study …
    extends = "demo"                # … is this recipe of the task, changed as in a recipe's file
    training = { num_threads = 1 }

    [demo.penalties]                # overrides `all` in this study
    grid = [0.0, 1.0]               # λ of both penalties

    [full.micro-batches]            # a preset of this study only
    extends = "iwslt14-shen2020"

Any other preset is the recipe of that name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.files import package_folder
from powernorm_lab.recipes.files import (
    Recipe,
    changed_recipe,
    laid_over,
    load_toml,
    named_recipe,
    paths_of,
)
from powernorm_lab.settings.comparison import ComparisonSettings

_FOLDERS: Final = package_folder("powernorm_lab.tasks")
_EVERY: Final = "all"
_OWN: Final = ("rows", "penalty_unit")


@dataclass(frozen=True)
class StudySize:
    """Base settings of a study of a task."""

    recipe: Recipe
    """Recipe with the name of the preset."""
    rows: str | None
    """Unit of `data.batch_size`; None means segments of `data.sequence_length` tokens."""
    penalty_unit: str | None
    """Setting whose value is a λ of 1 in `norm_options`; None means 1."""
    grid: Sequence[float] | None
    """λ of both penalties; None means the study's default."""

    def penalty(self, value: float, config: ComparisonSettings) -> float:
        """Convert a λ to its value in `norm_options`."""
        if self.penalty_unit is None:
            return value
        section, _, name = self.penalty_unit.partition(".")
        return float(value * getattr(getattr(config, section), name))


def study_size(task: str, study: str, preset: str) -> StudySize:
    """Return the base settings of a study.

    Raises:
        InputError: the task has no such preset for this study; lists the known ones.
    """
    table = _table(task)
    sizes: Mapping[str, Mapping[str, Any]] = table.get(preset, {}) if preset not in _OWN else {}
    values = laid_over(sizes.get(_EVERY, {}), sizes.get(study, {}))
    grid = values.pop("grid", None)
    if values:
        recipe = changed_recipe(preset, task, {"extends": preset, **values}, _path(task))
    elif preset in paths_of(task):
        recipe = named_recipe(task, preset)
    else:
        raise InputError(
            f"the study {study} of {task} has no preset {preset!r}: choose one of "
            f"{', '.join(presets_of(task, study))}"
        )
    return StudySize(recipe, table.get("rows"), table.get("penalty_unit"), grid)


def presets_of(task: str, study: str) -> list[str]:
    """Return the presets of a study: its sizes, and the recipes of its task."""
    own = [
        name
        for name, sizes in _table(task).items()
        if name not in _OWN and {_EVERY, study} & set(sizes)
    ]
    known = dict.fromkeys([*own, *paths_of(task)])
    first = [name for name in ("smoke", "demo", "full") if name in known]
    return list(dict.fromkeys([*first, *known]))


def _path(task: str) -> Path:
    return _FOLDERS / task.replace("-", "_") / "studies.toml"


@cache
def _table(task: str) -> Mapping[str, Any]:
    paths_of(task)  # raises for an unknown task
    return load_toml(_path(task))
