"""Published results for a recipe, and the main metric of a task."""

from powernorm.records import PaperStatistic
from powernorm_lab.recipes.files import Recipe, named_recipe, paths_of
from powernorm_lab.recipes.paper_results import PaperResult
from powernorm_lab.recipes.paper_statistics import SOURCE, statistics_of
from powernorm_lab.recipes.studies import study_recipe, study_results
from powernorm_lab.runs import TASKS, PaperRecord
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.registry import settings_of


def recipe_of(config: ComparisonSettings) -> Recipe | None:
    """Return the recipe that settings are based on, by its name, or None."""
    if config.study is not None:
        return study_recipe(config)
    if config.preset not in paths_of(config.task):
        return None
    return named_recipe(config.task, config.preset)


def measure_of(task: str) -> str:
    """Return the main metric of a task's comparisons.

    >>> measure_of("lm"), measure_of("translation")
    ('test_perplexity', 'test_bleu')
    """
    return settings_of(task).measure if task in TASKS else "test_perplexity"


def paper_records(config: ComparisonSettings, recipe: Recipe | None = None) -> list[PaperRecord]:
    """Return the published results for a recipe and placement.

    Args:
        config: settings of the comparison.
        recipe: recipe that they are based on; None finds it by the preset's name.
    """
    return [
        result.record()
        for result in paper_results(config, recipe)
        if result.placement == config.placement
    ]


def paper_results(
    config: ComparisonSettings, recipe: Recipe | None = None
) -> tuple[PaperResult, ...]:
    """Return the published results for a recipe, of every placement."""
    if config.study is not None:
        return study_results(config)  # whose norms are labels of variants
    found = recipe or recipe_of(config)
    return () if found is None else found.results


def paper_statistics(
    config: ComparisonSettings, recipe: Recipe | None = None
) -> list[PaperStatistic]:
    """Return the published statistics of a recipe's norms at its placement.

    Their data sets are those for which the recipe has results of that paper. Reduced recipes have
    these results, too.
    """
    results = () if config.study is not None else paper_results(config, recipe)
    datasets = {result.dataset for result in results if result.source.startswith(SOURCE)}
    return statistics_of(datasets, config.placement)
