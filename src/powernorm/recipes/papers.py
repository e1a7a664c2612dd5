"""What the papers print for a recipe."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from powernorm.recipes import language_modeling, translation
from powernorm.recipes.paper_results import PaperResult
from powernorm.runs import PaperRecord
from powernorm.training.config import ComparisonConfig

MEASURES: Final[Mapping[str, str]] = MappingProxyType({"translation": "test_bleu"})
"""What a comparison is about, for tasks that are not about `test_perplexity`."""


def measure_of(task: str) -> str:
    """Return the metric that comparisons of a task are about.

    >>> measure_of("lm"), measure_of("translation")
    ('test_perplexity', 'test_bleu')
    """
    return MEASURES.get(task, "test_perplexity")


def paper_records(config: ComparisonConfig) -> list[PaperRecord]:
    """Return what the papers print for this recipe and placement; empty where nothing."""
    return [
        result.record()
        for result in paper_results(config)
        if result.placement == config.model.placement
    ]


def paper_results(config: ComparisonConfig) -> tuple[PaperResult, ...]:
    """Return what the papers print for this recipe, of every placement."""
    # A study's variants are not the norms of these tables.
    if config.study is not None:
        return ()
    if config.task == "lm" and config.preset == "full":
        rows = language_modeling.PAPER_RESULTS
        return tuple(row for row in rows if row.dataset == "Penn Treebank")
    if config.task == "translation":
        return translation.PAPER_RESULTS.get(config.preset, ())
    return ()
