"""Language modelling: presets from seconds to the papers' setting, and the papers' numbers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from powernorm.recipes.family import Family, Recipe, RecipeInfo
from powernorm.recipes.language_modeling import plain, tensorized
from powernorm.recipes.language_modeling.plain import (
    DEMO_PENALTIES,
    TASK,
    demo,
    full,
    smoke,
)
from powernorm.recipes.language_modeling.results import (
    PAPER_RESULTS,
    PENN_TREEBANK,
    WIKITEXT,
    results_on,
)

__all__ = [
    "DEMO_PENALTIES",
    "FAMILY",
    "PAPER_RESULTS",
    "PRESETS",
    "TASK",
    "demo",
    "full",
    "smoke",
]

PRESETS: Final[Mapping[str, Recipe]] = MappingProxyType(
    {"smoke": smoke, "demo": demo, "full": full, **tensorized.PRESETS}
)

CATALOGUE: Final[dict[str, RecipeInfo]] = {**plain.CATALOGUE, **tensorized.CATALOGUE}

FAMILY: Final = Family(
    TASK,
    PRESETS,
    CATALOGUE,
    paper_results={
        "full": results_on(PENN_TREEBANK),
        **{
            preset: results_on(PENN_TREEBANK if preset.startswith("ptb") else WIKITEXT)
            for preset in tensorized.PRESETS
        },
    },
    notes={
        "full": (
            "The papers train a Tensorized Transformer whose published code sees the future; this "
            "model is causal."
        ),
        **tensorized.NOTES,
    },
    placed=("norm_options.rbn.mean_penalty", "norm_options.rbn.var_penalty"),
)
