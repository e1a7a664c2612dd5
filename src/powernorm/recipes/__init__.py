"""The experiments by task and preset: functions that return typed configurations.

>>> recipe("lm", "demo").norms
('ln', 'bn', 'rbn', 'pn', 'adanorm')
"""

from powernorm.recipes.catalogue import CATALOGUE, RecipeInfo
from powernorm.recipes.checks import check_choice
from powernorm.recipes.differences import reduced_note
from powernorm.recipes.papers import measure_of, paper_records
from powernorm.recipes.registry import RECIPES, recipe

__all__ = [
    "CATALOGUE",
    "RECIPES",
    "RecipeInfo",
    "check_choice",
    "measure_of",
    "paper_records",
    "recipe",
    "reduced_note",
]
