"""Recipes of experiments in TOML, by task and name, and the published results for them.

>>> recipe("lm", "demo").norms
('ln', 'bn', 'rbn', 'pn', 'adanorm')
"""

from powernorm_lab.recipes.checks import check_choice, chosen_settings
from powernorm_lab.recipes.differences import changes_of, reduced_note
from powernorm_lab.recipes.files import (
    Recipe,
    find_recipe,
    named_recipe,
    paths_of,
    read_recipe,
    recipes_of,
)
from powernorm_lab.recipes.papers import measure_of, paper_records, paper_statistics
from powernorm_lab.settings.comparison import ComparisonSettings

__all__ = [
    "Recipe",
    "changes_of",
    "check_choice",
    "chosen_settings",
    "find_recipe",
    "measure_of",
    "named_recipe",
    "paper_records",
    "paper_statistics",
    "paths_of",
    "read_recipe",
    "recipe",
    "recipes_of",
    "reduced_note",
]


def recipe(task: str, preset: str) -> ComparisonSettings:
    """Return the settings of a recipe that comes with powernorm.

    Raises:
        InputError: unknown task or preset; lists the known ones.
    """
    return named_recipe(task, preset).settings
