"""How a comparison differs from what the papers did whose numbers stand beside it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from powernorm.data.embedded import EMBEDDED
from powernorm.data.embedded_pairs import VERSES
from powernorm.data.sets.catalogue import SETS
from powernorm.recipes.paper_results import PaperResult
from powernorm.recipes.papers import paper_results
from powernorm.recipes.registry import RECIPES, family_of
from powernorm.recipes.studies import STUDIES, study_config
from powernorm.training.config import ComparisonConfig
from powernorm.training.variants import chosen_norms, lines_of

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


def reduced_note(config: ComparisonConfig) -> str | None:
    """Return in words how a comparison differs from the one that it stands for.

    That is a paper's experiment, and its own preset where no paper's numbers stand beside it. None
    where nothing differs. Whether it sees the future is said of every comparison.
    """
    return " ".join([*_about_future(config), *_about_paper(config)]) or None


def _about_future(config: ComparisonConfig) -> list[str]:
    marked = [line.label for line in lines_of(config) if line.config.model.sees_future]
    return [_FUTURE.format(runs=_listed(marked))] if marked else []


def _about_paper(config: ComparisonConfig) -> list[str]:
    """Return how it differs from a paper's experiment, a sentence each."""
    results = paper_results(config)
    if not results:
        return _about_making(config)
    family = family_of(config.task)
    target = family.stands_for.get(config.preset, config.preset)
    reference = RECIPES[config.task][target]()
    parts = []
    if target != config.preset:
        parts.append(f"A reduced {target}.")
    parts += filter(None, [family.notes.get(config.preset)])
    parts += _about_data(config, results[0].dataset)
    parts += _about_placement(config)
    changes = _changes(config, reference)
    if changes:
        parts.append(f"Against the preset {target}: {', '.join(changes)}.")
    return parts


def _about_making(config: ComparisonConfig) -> list[str]:
    """Return the note of a preset beside which no number stands, and what is not as it has it."""
    notes: Mapping[str, str] = {}
    if config.study is not None:
        if config.study.name not in STUDIES:
            return []
        own = study_config(config.task, config.study.name, config.preset)
    elif config.preset in RECIPES.get(config.task, ()):
        family = family_of(config.task)
        notes = family.notes
        own = RECIPES[config.task][config.preset]()
        if config.data.path == own.data.path:
            notes = {**family.data_notes, **notes}
    else:
        return []
    parts = [notes[config.preset]] if config.preset in notes else []
    # What is varied follows from the other settings.
    changes = _changes(replace(config, variants=own.variants), own)
    return [
        *parts,
        *([f"Against the preset {config.preset}: {', '.join(changes)}."] if changes else []),
    ]


def _about_placement(config: ComparisonConfig) -> list[str]:
    """Return what does not fit where the norms stand elsewhere than in the preset, a sentence each.

    These are settings that are still those of the preset's placement, and papers that have numbers
    of the other placement only.
    """
    own = RECIPES[config.task][config.preset]()
    if own.model.placement == config.model.placement:
        return []
    placement, other = own.model.placement, config.model.placement
    ours, theirs = _settings(config), _settings(own)
    kept = [
        f"{key} {_word(ours[key])}"
        for key in family_of(config.task).placed
        if key in ours and ours[key] == theirs.get(key) and _matters(key, config)
    ]
    twin = twin_of(config)
    sentences = []
    if kept:
        mend = f": use {twin}" if twin else ""
        verb = "is that" if len(kept) == 1 else "are those"
        sentences.append(f"{_listed(kept)} {verb} of {placement}-norm{mend}.")
    results = paper_results(config)
    with_other = {_paper(result) for result in results if result.placement == other}
    without = dict.fromkeys(_paper(one) for one in results if _paper(one) not in with_other)
    sentences += [
        f"{paper} have {placement}-norm only: no number of theirs is of {other}-norm."
        for paper in without
    ]
    return sentences


def twin_of(config: ComparisonConfig) -> str | None:
    """Return the preset that is this one with the norms where the configuration has them."""
    own = RECIPES[config.task][config.preset]().model.placement
    stem = config.preset.removesuffix(f"-{own}")
    twin = f"{stem}-{config.model.placement}"
    return twin if twin != config.preset and twin in RECIPES[config.task] else None


def _about_data(config: ComparisonConfig, dataset: str) -> list[str]:
    """Say which data were used, where they are not those that the preset asks for."""
    path = config.data.path
    own = RECIPES[config.task][config.preset]().data.path
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
        return list(filter(None, [family_of(config.task).data_notes.get(config.preset)]))
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


def _changes(config: ComparisonConfig, reference: ComparisonConfig) -> list[str]:
    """Settings that are not the reference's, in words: `model.num_layers 3 in place of 6`."""
    ours, theirs = _settings(config), _settings(reference)
    absent = object()
    return [
        f"{key} {_word(ours.get(key, 'its default'))} in place of "
        f"{_word(theirs.get(key, 'its default'))}"
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key, absent) != theirs.get(key, absent) and _matters(key, config)
    ]


def _matters(key: str, config: ComparisonConfig) -> bool:
    section, _, rest = key.partition(".")
    if section == "norm_options":
        return rest.partition(".")[0] in chosen_norms(config)
    return key not in UNIMPORTANT


def _settings(config: ComparisonConfig) -> dict[str, Any]:
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
