"""How a comparison differs from what the papers did whose numbers stand beside it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from powernorm_lab.data.embedded import EMBEDDED, VERSES
from powernorm_lab.data.sets.catalog import SETS
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
"""What the readers take where no data are named; they are not asked, for they import torch."""

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
"""Settings that change what a run costs or writes, not what it comes to, and the choices of norms
and seeds, which the results name anyway; the data have a sentence of their own."""


_OF_SCORES: Final = "training.score_every"
"""The setting that is as unimportant where the loss selects."""

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
"""Settings of which the papers have one value for pre-norm and another for post-norm, by task."""


def reduced_note(config: ComparisonSettings, recipe: Recipe | None = None) -> str | None:
    """Return in words what has to be known of a comparison beside a paper's numbers.

    None where nothing has. Whether it sees the future is said of every comparison.

    Args:
        config: of the comparison.
        recipe: it was made of; None means the one of its name.
    """
    own = recipe or recipe_of(config)
    return " ".join([*_about_future(config), *_about_recipe(config, own)]) or None


def changes_of(config: ComparisonSettings, recipe: Recipe | None = None) -> ChangesRecord | None:
    """Return the settings that are not as in the preset that a comparison stands for.

    That is a paper's experiment, and its own preset where it is no smaller one of these. None where
    nothing differs.

    Args:
        config: of the comparison.
        recipe: it was made of; None means the one of its name.
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
    """What is not said has its default."""
    change = ChangeRecord()
    if key in here:
        change["here"] = here[key]
    if key in there:
        change["preset"] = there[key]
    return change


def _reference(
    config: ComparisonSettings, recipe: Recipe | None
) -> tuple[str, ComparisonSettings] | None:
    """Return name and settings of what a comparison stands for."""
    if config.study is not None:
        if study_recipe(config) is None:
            return None
        own = study_config(config.task, config.study.name, config.preset)
        # What is varied follows from the other settings.
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
    """Return what a recipe says of itself, and what of its data and placement is not as in it."""
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
    """Return what does not fit where the norms stand elsewhere than in the preset, a sentence each.

    These are settings that are still those of the preset's placement, and papers that have numbers
    of the other placement only.
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
    """Return the recipe that is this one with the norms at another placement."""
    names = paths_of(recipe.settings.task)
    twin = f"{recipe.name.removesuffix(f'-{recipe.settings.placement}')}-{placement}"
    return twin if twin != recipe.name and twin in names and recipe.name in names else None


def _about_data(config: ComparisonSettings, recipe: Recipe) -> list[str]:
    """Say which data were used, where they are not those that the preset asks for."""
    dataset = recipe.results[0].dataset
    path, own = config.data.path, recipe.settings.data.path
    if config.task == "lm":
        # Named as one speaks of it.
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
    # A set may also be given by its name where the preset has the paper's files.
    return (
        [] if path == dataset.lower().replace("-", "") else [f"The data are {path}, not {dataset}."]
    )


def _is_held(path: str) -> bool:
    """Whether a path names a set that powernorm holds or fetches, and not files."""
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
    """Return the values by dotted key, as `--set` names them; variants by their labels."""
    labels = [variant.label for variant in config.variants]
    return dict(_flat(to_json(config) | {"variants": labels}, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
