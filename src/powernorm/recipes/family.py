"""What the recipes of one task have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from powernorm.recipes.paper_results import PaperResult
from powernorm.training.config import ComparisonConfig

Recipe = Callable[[], ComparisonConfig]

EMBEDDED: Final = "embedded"
"""Needs no data of one's own."""
GPU: Final = "on one GPU, an estimate"
"""The end of the cost of what nobody here has run."""


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """One line of the list of recipes."""

    summary: str
    data: str
    """`EMBEDDED`, or which official files and how `--data` takes them."""
    cost: str
    """Rough; says where it is an estimate. Of all its norms and seeds together."""
    source: str = ""
    """Paper and table that it repeats."""


@dataclass(frozen=True, slots=True)
class Family:
    """The recipes of a task, and what is said about them."""

    task: str
    presets: Mapping[str, Recipe]
    catalogue: Mapping[str, RecipeInfo]
    """By preset, in the same order."""
    measure: str = "test_perplexity"
    """The metric that its comparisons are about."""
    paper_results: Mapping[str, tuple[PaperResult, ...]] = field(default_factory=dict)
    """What the papers print, by preset, for every placement."""
    stands_for: Mapping[str, str] = field(default_factory=dict)
    """Presets that are smaller than another; each paper's preset stands for itself."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """How a preset differs from the papers by its making, whatever its data; a sentence."""
    data_notes: Mapping[str, str] = field(default_factory=dict)
    """How a preset's own data differ from the papers'; a sentence."""
    placed: tuple[str, ...] = ()
    """Settings of which the papers have one value for pre-norm and another for post-norm."""
