"""How a comparison differs from what the papers did whose numbers stand beside it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from powernorm.lab.data.embedded import EMBEDDED
from powernorm.lab.data.sets.catalogue import SETS
from powernorm.lab.recipes.files import Recipe, named_recipe, paths_of
from powernorm.lab.recipes.paper_results import PaperResult
from powernorm.lab.recipes.papers import recipe_of
from powernorm.lab.recipes.studies import STUDIES, study_config
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.variants import chosen_norms, lines_of
from powernorm.lab.tasks.translation.verses import VERSES

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
    }
)
"""What the readers take where no data are named; they are not asked, for they import torch."""

UNIMPORTANT: Final = frozenset(
    {
        *("task", "preset", "norms", "seeds", "data.path", "data.evaluation_batch_size"),
        *("decoding.batch_tokens", "training.accelerator", "training.num_threads"),
        *("training.strategy", "training.log_every", "training.monitor_every"),
        *("training.tid_batches", "training.early_checkpoint", "training.record_scales"),
    }
)
"""Settings that change what a run costs or writes, not what it comes to, and the choices of norms
and seeds, which the results name anyway; the data have a sentence of their own."""


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
    """Return in words how a comparison differs from the one that it stands for.

    That is a paper's experiment, and its own preset where no paper's numbers stand beside it. None
    where nothing differs. Whether it sees the future is said of every comparison.

    Args:
        config: of the comparison.
        recipe: it was made of; None means the one of its name.
    """
    own = recipe or recipe_of(config)
    return " ".join([*_about_future(config), *_about_paper(config, own)]) or None


def _about_future(config: ComparisonSettings) -> list[str]:
    marked = [
        line.label for line in lines_of(config) if getattr(line.config.model, "sees_future", False)
    ]
    return [_FUTURE.format(runs=_listed(marked))] if marked else []


def _about_paper(config: ComparisonSettings, recipe: Recipe | None) -> list[str]:
    """Return how it differs from a paper's experiment, a sentence each."""
    if recipe is None or not recipe.results or config.study is not None:
        return _about_making(config, recipe)
    about = recipe.about
    reference, target = recipe.settings, recipe.name
    parts = []
    if about.stands_for is not None:
        target = about.stands_for
        reference = named_recipe(config.task, target).settings
        parts.append(f"A reduced {target}.")
    parts += filter(None, [about.note])
    parts += _about_data(config, recipe)
    parts += _about_placement(config, recipe)
    changes = _changes(config, reference)
    if changes:
        parts.append(f"Against the preset {target}: {', '.join(changes)}.")
    return parts


def _about_making(config: ComparisonSettings, recipe: Recipe | None) -> list[str]:
    """Return the note of a preset beside which no number stands, and what is not as it has it."""
    parts: list[str] = []
    own: ComparisonSettings
    if config.study is not None:
        if config.study.name not in STUDIES:
            return []
        own = study_config(config.task, config.study.name, config.preset)
    elif recipe is not None:
        own, about = recipe.settings, recipe.about
        data_note = about.data_note if config.data.path == own.data.path else None
        parts = list(filter(None, [about.note or data_note]))
    else:
        return []
    # What is varied follows from the other settings.
    changes = _changes(replace(config, variants=own.variants), own)
    return [
        *parts,
        *([f"Against the preset {config.preset}: {', '.join(changes)}."] if changes else []),
    ]


def _about_placement(config: ComparisonSettings, recipe: Recipe) -> list[str]:
    """Return what does not fit where the norms stand elsewhere than in the preset, a sentence each.

    These are settings that are still those of the preset's placement, and papers that have numbers
    of the other placement only.
    """
    own = recipe.settings
    if own.placement == config.placement:
        return []
    placement, other = own.placement, config.placement
    ours, theirs = _settings(config), _settings(own)
    kept = [
        f"{key} {_word(ours[key])}"
        for key in _PLACED.get(config.task, ())
        if key in ours and ours[key] == theirs.get(key) and _matters(key, config)
    ]
    twin = twin_of(recipe, config.placement)
    sentences = []
    if kept:
        fix = f": use {twin}" if twin else ""
        verb = "is that" if len(kept) == 1 else "are those"
        sentences.append(f"{_listed(kept)} {verb} of {placement}-norm{fix}.")
    with_other = {_paper(result) for result in recipe.results if result.placement == other}
    without = dict.fromkeys(_paper(one) for one in recipe.results if _paper(one) not in with_other)
    sentences += [
        f"{paper} have {placement}-norm only: no number of theirs is of {other}-norm."
        for paper in without
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


def _changes(config: ComparisonSettings, reference: ComparisonSettings) -> list[str]:
    """Settings that are not the reference's, in words: `model.num_layers 3 in place of 6`."""
    ours, theirs = _settings(config), _settings(reference)
    absent = object()
    return [
        f"{key} {_word(ours.get(key, 'its default'))} in place of "
        f"{_word(theirs.get(key, 'its default'))}"
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key, absent) != theirs.get(key, absent) and _matters(key, config)
    ]


def _matters(key: str, config: ComparisonSettings) -> bool:
    section, _, rest = key.partition(".")
    if section == "norm_options":
        return rest.partition(".")[0] in chosen_norms(config)
    return key not in UNIMPORTANT


def _settings(config: ComparisonSettings) -> dict[str, Any]:
    return dict(_flat(config, ""))


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Values by dotted key, as `--set` names them; variants by their labels."""
    if is_dataclass(value):
        pairs = [(item.name, getattr(value, item.name)) for item in fields(value)]
    else:
        pairs = list(value.items())
    for name, item in pairs:
        key = f"{prefix}{name}"
        if name == "variants":
            yield key, tuple(variant.label for variant in item)
        elif isinstance(item, Mapping) or is_dataclass(item):
            yield from _flat(item, f"{key}.")
        else:
            yield key, item


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
