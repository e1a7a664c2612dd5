"""Studies: comparisons of variants of a norm, each after a paper's figure or table, on any task.

>>> [variant.label for variant in study_config("lm", "lowest-layers", "smoke").variants]
['ln', 'bn-1of2', 'bn-2of2']
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Final, get_type_hints

from powernorm.errors import InputError
from powernorm_lab.engine.line import Line
from powernorm_lab.recipes.files import Recipe
from powernorm_lab.recipes.paper_results import PaperResult
from powernorm_lab.recipes.studies.causality import FUTURE
from powernorm_lab.recipes.studies.definition import StudyRecipe
from powernorm_lab.recipes.studies.shen2020 import ALPHA_GRID, MICRO_BATCHES, SCALES
from powernorm_lab.recipes.studies.sizes import StudySize, presets_of, study_size
from powernorm_lab.recipes.studies.wang2022 import LOWEST_LAYERS, PENALTY_GRID
from powernorm_lab.recipes.studies.xu2019 import LAYERNORM_PARTS
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import override
from powernorm_lab.settings.variants import lines_of
from powernorm_lab.tasks.registry import settings_of

__all__ = [
    "STUDIES",
    "StudyRecipe",
    "presets_of",
    "study_config",
    "study_recipe",
    "study_results",
    "tasks_of",
]

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
            FUTURE,
        )
    }
)
"""Studies by name."""


def tasks_of(name: str) -> list[str]:
    """Return the tasks whose models have the setting that a study needs."""
    needs = STUDIES[name].needs
    models = {task: get_type_hints(settings_of(task))["model"] for task in TASKS}
    return [
        task
        for task, model in models.items()
        if not needs or needs in {item.name for item in fields(model)}
    ]


def study_config(
    task: str, name: str, preset: str = "demo", assignments: Sequence[str] = ()
) -> ComparisonSettings:
    """Return the configuration of a study, with its variants.

    Args:
        task: name of the task.
        name: one of `STUDIES`.
        preset: `smoke`, `demo`, `full` if there is one, or any recipe of the task.
        assignments: settings as for `--set`, applied before the variants are made; `norms` selects
            the variants of these norms.

    Raises:
        InputError: unknown task, study or preset; a study that the task's model does not support; a
            setting that does not fit, or that every variant sets itself.
    """
    size = _size(task, name, preset)
    config = _varied(STUDIES[name], size, assignments)
    lines = lines_of(config)
    for index, assignment in enumerate(assignments):
        others = [*assignments[:index], *assignments[index + 1 :]]
        if _has_no_effect(STUDIES[name], size, others, config, lines):
            raise InputError(
                f"{assignment} has no effect on the study {name}, whose variants set this "
                "themselves: leave it out"
            )
    return config


def study_recipe(config: ComparisonSettings) -> Recipe | None:
    """Return the base recipe of a built-in study; None for other comparisons."""
    size = _known_size(config)
    return None if size is None else size.recipe


def study_results(config: ComparisonSettings) -> tuple[PaperResult, ...]:
    """Return the published results of a study's variants, by their labels.

    These are the rows of a paper's tables that the study repeats, such as BatchNorm with the whole
    batch. Figures give no numbers.
    """
    size = _known_size(config)
    if size is None or config.study is None:
        return ()
    labels: dict[str, list[str]] = {}
    for label, row in STUDIES[config.study.name].rows(size, config).items():
        if any(variant.label == label for variant in config.variants):
            labels.setdefault(row, []).append(label)
    return tuple(
        replace(result, norm=label, against=_against(result, place, labels))
        for place in range(max(map(len, labels.values()), default=0))
        for result in size.recipe.results
        for label in labels.get(result.norm, ())[place : place + 1]
    )


def _against(
    result: PaperResult, place: int, labels: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return the labels that a result is compared with, of variants of the same form."""
    return tuple(
        labels[row][min(place, len(labels[row]) - 1)] for row in result.against if row in labels
    )


def _known_size(config: ComparisonSettings) -> StudySize | None:
    if config.study is None or config.study.name not in STUDIES:
        return None  # no study, or a user-defined one
    try:
        return _size(config.task, config.study.name, config.preset)
    except InputError:  # a user-defined study with the name of a built-in one
        return None


def _size(task: str, name: str, preset: str) -> StudySize:
    if name not in STUDIES:
        raise InputError(f"there is no study {name!r}: choose one of {', '.join(STUDIES)}")
    settings_of(task)
    sensible = tasks_of(name)
    if task not in sensible:
        raise InputError(
            f"the study {name} does not apply to the task {task}, whose model has no setting "
            f"model.{STUDIES[name].needs}: choose one of {', '.join(sensible)}"
        )
    return study_size(task, name, preset)


def _varied(study: StudyRecipe, size: StudySize, assignments: Sequence[str]) -> ComparisonSettings:
    base = _base(study, size.recipe.settings)
    chosen = override(base, assignments)
    # Variants are made from all norms of the study; the chosen norms only select among them.
    variants = study.variants(size, replace(chosen, norms=base.norms))
    info = study.info
    if study.x_label is not None:
        info = replace(info, x_label=study.x_label(size, chosen))
    return replace(chosen, study=info, variants=variants)


def _base(study: StudyRecipe, config: ComparisonSettings) -> ComparisonSettings:
    """Return a recipe's settings with the study's norms in place of its own."""
    options = {
        norm: kept
        for norm, chosen in config.norm_options.items()
        if norm in study.norms
        and (kept := {key: one for key, one in chosen.items() if key not in study.varied_options})
    }
    return study.base(replace(config, norms=study.norms, norm_options=options, variants=()))


def _has_no_effect(
    study: StudyRecipe,
    size: StudySize,
    others: Sequence[str],
    config: ComparisonSettings,
    lines: Sequence[Line],
) -> bool:
    """Return whether the settings, but no run, would be different without an assignment."""
    try:
        without = _varied(study, size, others)
    except InputError:  # another assignment needs it
        return False
    if without.norms != config.norms or without.seeds != config.seeds:
        return False
    plain = replace(without, variants=(), study=None) != replace(config, variants=(), study=None)
    return plain and lines_of(without) == lines
