"""Differences between a comparison and the papers' experiments that it is shown with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from powernorm_lab.data.catalog import SETS
from powernorm_lab.data.embedded import EMBEDDED, VERSES
from powernorm_lab.recipes.files import Recipe, named_recipe, paths_of
from powernorm_lab.recipes.paper_results import PaperResult
from powernorm_lab.recipes.papers import recipe_of
from powernorm_lab.recipes.studies import study_config, study_recipe
from powernorm_lab.runs import ChangeRecord, ChangesRecord, placement_words
from powernorm_lab.settings.comparison import ComparisonSettings, to_json
from powernorm_lab.settings.variants import chosen_norms, lines_of

_VERSES: Final = (
    "The papers' numbers are of {dataset}, these of the embedded verses: compare the norms' "
    "differences, not the levels."
)

_FUTURE: Final = (
    "{runs}: without the causal mask, as the published code of the papers' model. What sees the "
    "future predicts tokens that it is given: its perplexity is that of no language model."
)

_DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lm": "sotu",
        "lm-char": "sotu",
        "translation": VERSES,
        "classify": "rt",
        "ner": "hironsan",
        "parse": "petrogold",
        "image": "mnist",
        "sequences": "japanese-vowels",
    }
)
"""Default data set of each task; repeated here because the readers import torch."""

UNIMPORTANT: Final = frozenset(
    {
        *("task", "preset", "norms", "seeds", "data.path", "data.evaluation_batch_size"),
        *("decoding.batch_tokens", "training.accelerator", "training.num_threads"),
        *("training.compile", "training.strategy"),
        *("training.log_every", "training.monitor_every"),
        *("training.tid_batches", "training.early_checkpoint", "training.record_scales"),
        "training.diagnose_every",
    }
)
"""Settings that change a run's cost or files but not its result; norms and seeds, which the results
name anyway; and the data, which have a sentence of their own."""


_OF_SCORES: Final = "training.score_every"
"""Setting that is also unimportant if the loss selects the best checkpoint."""

_PLACED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "lm": ("norm_options.rbn.mean_penalty", "norm_options.rbn.var_penalty"),
        **dict.fromkeys(
            ("translation", "classify"),
            (
                "optimizer.learning_rate",
                "norm_options.rbn.mean_penalty",
                "norm_options.rbn.var_penalty",
            ),
        ),
    }
)
"""Settings whose values in the papers differ between pre-norm and post-norm, by task."""


def reduced_note(config: ComparisonSettings, recipe: Recipe | None = None) -> str | None:
    """Return the caveat that is shown next to a paper's numbers, or None.

    A model that sees the future is noted in every comparison.

    Args:
        config: settings of the comparison.
        recipe: recipe that they are based on; None finds it by the preset's name.
    """
    own = recipe or recipe_of(config)
    return " ".join([*_about_future(config), *_about_recipe(config, own)]) or None


def changes_of(config: ComparisonSettings, recipe: Recipe | None = None) -> ChangesRecord | None:
    """Return the settings that differ from a comparison's reference preset, or None.

    The reference is the paper's experiment for a reduced preset, otherwise the preset itself.

    Args:
        config: settings of the comparison.
        recipe: recipe that they are based on; None finds it by the preset's name.
    """
    found = _reference(config, recipe or recipe_of(config))
    if found is None:
        return None
    preset, reference = found
    here, there = _settings(config), _settings(reference)
    absent = object()
    changed = [
        key
        for key in dict.fromkeys([*here, *there])
        if here.get(key, absent) != there.get(key, absent) and _matters(key, config)
    ]
    if not changed:
        return None
    return ChangesRecord(
        preset=preset, settings={key: _change(key, here, there) for key in changed}
    )


def _change(key: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> ChangeRecord:
    """Return both values of a setting; an absent value is the default."""
    change = ChangeRecord()
    if key in here:
        change["here"] = here[key]
    if key in there:
        change["preset"] = there[key]
    return change


def _reference(
    config: ComparisonSettings, recipe: Recipe | None
) -> tuple[str, ComparisonSettings] | None:
    """Return name and settings of the reference preset; None without one."""
    if config.study is not None:
        if study_recipe(config) is None:
            return None
        own = study_config(config.task, config.study.name, config.preset)
        # The variants follow from the other settings, so that they never count as a difference.
        return config.preset, replace(own, variants=config.variants)
    if recipe is None:
        return None
    stands_for = recipe.about.stands_for
    if stands_for is not None:
        return stands_for, named_recipe(config.task, stands_for).settings
    return recipe.name, recipe.settings


def _about_future(config: ComparisonSettings) -> list[str]:
    marked = [
        line.name for line in lines_of(config) if getattr(line.settings.model, "sees_future", False)
    ]
    return [_FUTURE.format(runs=_listed(marked))] if marked else []


def _about_recipe(config: ComparisonSettings, recipe: Recipe | None) -> list[str]:
    """Return a recipe's own notes and sentences about different data and placement."""
    if recipe is None:
        return []
    about = recipe.about
    if not recipe.results:
        has_own_data = config.data.path == recipe.settings.data.path
        return list(filter(None, [about.note or (about.data_note if has_own_data else None)]))
    stand_in = [f"A reduced {about.stands_for}."] if about.stands_for else []
    return [
        *stand_in,
        *filter(None, [about.note]),
        *_about_data(config, recipe),
        *_about_placement(config, recipe),
    ]


def _about_placement(config: ComparisonSettings, recipe: Recipe) -> list[str]:
    """Return a sentence for each problem of a placement that is not the preset's.

    Problems are settings that are meant for the preset's placement, and papers without numbers for
    this placement.
    """
    own = recipe.settings
    if own.placement == config.placement:
        return []
    placement, other = placement_words(own.placement), placement_words(config.placement)
    ours, theirs = _settings(config), _settings(own)
    kept = [
        f"{key} {ours[key]:g}"
        for key in _PLACED.get(config.task, ())
        if key in ours and ours[key] == theirs.get(key) and _matters(key, config)
    ]
    twin = twin_of(recipe, config.placement)
    sentences = []
    if kept:
        fix = f": use {twin}" if twin else ""
        verb = "is that" if len(kept) == 1 else "are those"
        sentences.append(f"{_listed(kept)} {verb} of {placement}{fix}.")
    with_other = {
        _paper(result) for result in recipe.results if result.placement == config.placement
    }
    without = dict.fromkeys(_paper(one) for one in recipe.results if _paper(one) not in with_other)
    sentences += [
        f"{paper} have {placement} only: no number of theirs is of {other}." for paper in without
    ]
    return sentences


def twin_of(recipe: Recipe, placement: str) -> str | None:
    """Return the name of the same recipe with another placement of the norms, or None."""
    names = paths_of(recipe.settings.task)
    twin = f"{recipe.name.removesuffix(f'-{recipe.settings.placement}')}-{placement}"
    return twin if twin != recipe.name and twin in names and recipe.name in names else None


def _about_data(config: ComparisonSettings, recipe: Recipe) -> list[str]:
    """Return a sentence about the data if they are not the preset's."""
    dataset = recipe.results[0].dataset
    path, own = config.data.path, recipe.settings.data.path
    if config.task == "lm":
        dataset = f"the {dataset}"
    if config.task == "translation" and path in (None, VERSES):
        if own is None:
            return [_VERSES.format(dataset=dataset)]
        return [f"The data are the embedded verses, not {dataset}."]
    if config.task == "lm" and (path is None or path in EMBEDDED):
        return [f"The text is an embedded one, not {dataset}."]
    path, own = path or _DEFAULTS[config.task], own or _DEFAULTS[config.task]
    if path == own or (not _is_held(own) and PurePath(path) == PurePath(own)):
        return list(filter(None, [recipe.about.data_note]))
    if not _is_held(path):
        return [f"The data are {path}; whether they are {dataset} is not known."]
    # The preset may have the paper's files, and the user the name of the same data set.
    return (
        [] if path == dataset.lower().replace("-", "") else [f"The data are {path}, not {dataset}."]
    )


def _is_held(path: str) -> bool:
    """Return whether a path is the name of an embedded or fetched data set, not of files."""
    return path in SETS and SETS[path].home != "own"


def _paper(result: PaperResult) -> str:
    return result.source.partition(",")[0]


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _matters(key: str, config: ComparisonSettings) -> bool:
    if key == _OF_SCORES and not config.selects_by_score:
        return False
    section, _, rest = key.partition(".")
    if section == "norm_options":
        return rest.partition(".")[0] in chosen_norms(config)
    return key not in UNIMPORTANT


def _settings(config: ComparisonSettings) -> dict[str, Any]:
    """Return the values by dotted key, as for `--set`; variants are lists of labels."""
    labels = [variant.label for variant in config.variants]
    return dict(_flat(to_json(config) | {"variants": labels}, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
