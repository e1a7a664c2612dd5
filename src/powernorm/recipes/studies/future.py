"""The study of what a language model without its causal mask hides: does the gain survive it?"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from powernorm.recipes.language_modeling.results import PENN_TREEBANK, results_on
from powernorm.recipes.language_modeling.tensorized import HEAD_FEATURES
from powernorm.recipes.paper_results import PaperResult
from powernorm.recipes.studies.recipes import StudyRecipe, sized
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    Variant,
)

NORMS: Final = ("ln", "bn", "rbn", "pn")
SEEDS: Final = (0, 1, 2)
PENALTIES: Final[Mapping[str, float]] = MappingProxyType({"mean_penalty": 0.1, "var_penalty": 1.0})
"""Of the sizes below the papers' (`recipes.language_modeling` says how they were found)."""
HEADS: Final = {"smoke": 8, "demo": 16, "reduced": HEAD_FEATURES, "full": HEAD_FEATURES}
"""Features of the one head, by preset."""
COMPARED: Final = ("demo", "reduced", "full")
"""Presets beside which the papers' numbers stand."""
MARK: Final = "-future"
"""Ends the label of a variant that sees the future."""


def future_base(preset: str) -> ComparisonConfig:
    """Return the Tensorized Transformer that is trained with its mask and without.

    `demo` has 2 layers of 64 and 600 steps, `reduced` 3 layers of 128 and 1,500 steps, both on
    segments of 32 in batches of 32; `full` is the papers' Penn-Treebank setting. The text is the
    embedded addresses, 2,000 subwords in `reduced` and 10,000 in `full`.
    """
    config = _reduced() if preset == "reduced" else sized(preset)
    model = replace(
        config.model, architecture="tensorized", num_heads=1, head_features=HEADS[preset]
    )
    options = config.norm_options if preset == "full" else {"rbn": dict(PENALTIES)}
    seeds = config.seeds if preset in ("smoke", "demo") else SEEDS
    return replace(config, norms=NORMS, seeds=seeds, model=model, norm_options=options)


def _reduced() -> ComparisonConfig:
    base = sized("demo")
    return replace(
        base,
        preset="reduced",
        data=DataConfig(
            vocabulary_size=2000, sequence_length=32, batch_size=32, evaluation_batch_size=128
        ),
        model=ModelConfig(
            num_features=128,
            num_layers=3,
            num_heads=1,
            feedforward_features=512,
            dropout=0.1,
            activation="relu",
        ),
        optimizer=OptimizerConfig(learning_rate=8e-3),
        training=replace(
            base.training, max_steps=1500, log_every=25, validate_every=150, monitor_every=50
        ),
    )


def future(config: ComparisonConfig) -> tuple[Variant, ...]:
    """Return each norm in the causal form, then each in that which sees the future."""
    return tuple(
        Variant(f"{norm}{mark}", norm, settings={"model.sees_future": str(bool(mark)).lower()})
        for mark in ("", MARK)
        for norm in config.norms
    )


def _printed() -> tuple[PaperResult, ...]:
    """Return the papers' numbers of the norms of the study, for both forms."""
    return tuple(
        replace(
            result,
            norm=f"{result.norm}{mark}",
            against=tuple(f"{norm}{mark}" for norm in result.against),
        )
        for mark in ("", MARK)
        for result in results_on(PENN_TREEBANK)
        if result.norm in NORMS
    )


FUTURE: Final = StudyRecipe(
    Study(
        name="future",
        title="With and without the causal mask",
        source="Shen et al. 2020, Table 2, and Wang et al. 2022, Table 2",
    ),
    "Tensorized Transformer, causal and seeing the future (S20, W22 Table 2)",
    future_base,
    future,
    presets=("smoke", *COMPARED),
    paper_results=dict.fromkeys(COMPARED, _printed()),
    notes=dict.fromkeys(
        COMPARED,
        "The papers' numbers are of the Penn Treebank and of code that sees the future; they stand "
        "beside both forms, for the signs of their differences to LayerNorm.",
    ),
)
