"""What the papers print for a recipe."""

from powernorm.recipes.paper_results import PaperResult
from powernorm.recipes.registry import RECIPES, family_of
from powernorm.runs import PaperRecord
from powernorm.training.config import ComparisonConfig


def measure_of(task: str) -> str:
    """Return the metric that comparisons of a task are about.

    >>> measure_of("lm"), measure_of("translation")
    ('test_perplexity', 'test_bleu')
    """
    return family_of(task).measure if task in RECIPES else "test_perplexity"


def paper_records(config: ComparisonConfig) -> list[PaperRecord]:
    """Return what the papers print for this recipe and placement; empty where nothing."""
    return [
        result.record()
        for result in paper_results(config)
        if result.placement == config.model.placement
    ]


def paper_results(config: ComparisonConfig) -> tuple[PaperResult, ...]:
    """Return what the papers print for this recipe, of every placement; nothing for a study."""
    # A study's variants are not the norms of these tables.
    if config.study is not None or config.task not in RECIPES:
        return ()
    return family_of(config.task).paper_results.get(config.preset, ())
