"""Studies: comparisons of variants of a norm, each with a figure of a paper.

>>> [variant.label for variant in study_config("lm", "lowest-layers", "smoke").variants]
['ln', 'bn-1of2', 'bn-2of2']
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.recipes.studies.recipes import PRESETS, TASK, StudyRecipe
from powernorm.lab.recipes.studies.shen2020 import ALPHA_GRID, MICRO_BATCHES, SCALES
from powernorm.lab.recipes.studies.wang2022 import LOWEST_LAYERS, PENALTY_GRID
from powernorm.lab.recipes.studies.xu2019 import LAYERNORM_PARTS
from powernorm.lab.settings.overrides import override
from powernorm.lab.settings.variants import Line, lines_of
from powernorm.lab.tasks.lm.settings import LanguageModelSettings

__all__ = ["STUDIES", "StudyRecipe", "study_config"]

STUDIES: Final[Mapping[str, StudyRecipe]] = MappingProxyType(
    {
        recipe.info.name: recipe
        for recipe in (
            MICRO_BATCHES,
            LOWEST_LAYERS,
            PENALTY_GRID,
            ALPHA_GRID,
            SCALES,
            LAYERNORM_PARTS,
        )
    }
)
"""Studies by name."""


def study_config(
    task: str, name: str, preset: str = "demo", assignments: Sequence[str] = ()
) -> LanguageModelSettings:
    """Return the configuration of a study, with its variants.

    Args:
        task: what is trained; studies exist for `lm`.
        name: one of `STUDIES`.
        preset: `smoke`, `demo` or `full`.
        assignments: settings as `--set` takes them, before the variants are made; `norms` keeps
            the variants of these norms.

    Raises:
        InputError: unknown task, study or preset; a setting that does not fit, or that every
            variant sets itself.
    """
    if name not in STUDIES:
        raise InputError(f"There is no study {name!r}: choose one of {', '.join(STUDIES)}.")
    if task != TASK:
        raise InputError(f"The task {task!r} has no studies: choose {TASK}.")
    if preset not in PRESETS:
        raise InputError(
            f"The study {name} has no preset {preset!r}: choose one of {', '.join(PRESETS)}."
        )
    config = _varied(STUDIES[name], preset, assignments)
    lines = lines_of(config)
    for index, assignment in enumerate(assignments):
        others = [*assignments[:index], *assignments[index + 1 :]]
        if _has_no_effect(STUDIES[name], preset, others, config, lines):
            raise InputError(
                f"{assignment} has no effect on the study {name}, whose variants set this "
                "themselves: leave it out."
            )
    return config


def _varied(recipe: StudyRecipe, preset: str, assignments: Sequence[str]) -> LanguageModelSettings:
    base = recipe.base(preset)
    chosen = override(base, assignments)
    # Variants come from the study's own norms; those that are chosen only leave some out.
    variants = recipe.variants(replace(chosen, norms=base.norms))
    return replace(chosen, study=recipe.info, variants=variants)


def _has_no_effect(
    recipe: StudyRecipe,
    preset: str,
    others: Sequence[str],
    config: LanguageModelSettings,
    lines: Sequence[Line],
) -> bool:
    """Whether the runs are the same without a setting although the configuration is not."""
    try:
        without = _varied(recipe, preset, others)
    except InputError:  # one of the others needs it
        return False
    if without.norms != config.norms or without.seeds != config.seeds:
        return False
    plain = replace(without, variants=(), study=None) != replace(config, variants=(), study=None)
    return plain and lines_of(without) == lines
