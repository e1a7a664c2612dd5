"""What the papers print for a recipe, and how a comparison differs from what they did."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, Final

from powernorm.recipes import language_modeling, translation
from powernorm.recipes.paper_results import PaperResult
from powernorm.recipes.registry import RECIPES
from powernorm.runs import PaperRecord
from powernorm.training.config import ComparisonConfig

MEASURES: Final[Mapping[str, str]] = MappingProxyType({"translation": "test_bleu"})
"""What a comparison is about, for tasks that are not about `test_perplexity`."""

STANDS_FOR: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {("translation", "verses-reduced"): "verses-small"}
)
"""Presets that are smaller than another of their task; each paper's preset stands for itself."""

_VERSES: Final = (
    "The papers' numbers are of IWSLT14 German-English, these of the embedded verses: compare the "
    "norms' differences, not the levels."
)
_TENSORIZED: Final = (
    "The papers train a Tensorized Transformer whose published code sees the future; this model "
    "is causal."
)
NOTES: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        ("lm", "full"): _TENSORIZED,
        ("translation", "verses-small"): _VERSES,
        ("translation", "verses-reduced"): _VERSES,
    }
)
"""How a preset differs from the papers by its making."""

UNIMPORTANT: Final = frozenset(
    {
        *("task", "preset", "norms", "seeds", "data.path", "data.batch_size"),
        *("data.evaluation_batch_size", "decoding.batch_tokens", "training.accelerator"),
        *("training.num_threads", "training.strategy", "training.log_every"),
        *("training.validation_tokens", "training.monitor_every", "training.tid_batches"),
        *("training.early_checkpoint", "training.record_scales"),
    }
)
"""Settings that change what a run costs or writes, not what it comes to, and the choices of norms,
seeds and files, which the results name anyway."""


def measure_of(task: str) -> str:
    """Return the metric that comparisons of a task are about.

    >>> measure_of("lm"), measure_of("translation")
    ('test_perplexity', 'test_bleu')
    """
    return MEASURES.get(task, "test_perplexity")


def paper_records(config: ComparisonConfig) -> list[PaperRecord]:
    """Return what the papers print for this recipe and placement; empty where nothing."""
    return [
        result.record() for result in _results(config) if result.placement == config.model.placement
    ]


def reduced_note(config: ComparisonConfig) -> str | None:
    """Return in words how a comparison differs from the one that it stands for.

    None for recipes beside which no paper's numbers stand, and where nothing differs.
    """
    if not _results(config):
        return None
    target = STANDS_FOR.get((config.task, config.preset), config.preset)
    parts = []
    if target != config.preset:
        parts.append(f"A reduced {target}.")
    if (config.task, config.preset) in NOTES:
        parts.append(NOTES[config.task, config.preset])
    if config.task == "lm" and config.data.path is None:
        parts.append("The text is an embedded one; the papers' is the Penn Treebank.")
    changes = _changes(config, RECIPES[config.task][target]())
    if changes:
        parts.append(f"Against the preset {target}: {', '.join(changes)}.")
    return " ".join(parts) or None


def _results(config: ComparisonConfig) -> tuple[PaperResult, ...]:
    # A study's variants are not the norms of these tables.
    if config.study is not None:
        return ()
    if config.task == "lm" and config.preset == "full":
        rows = language_modeling.PAPER_RESULTS
        return tuple(row for row in rows if row.dataset == "Penn Treebank")
    if config.task == "translation":
        return translation.PAPER_RESULTS.get(config.preset, ())
    return ()


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
        return rest.partition(".")[0] in config.norms
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
