"""Masked language modelling on padded sentences: what the norms do where padding masks matter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from powernorm.recipes import language_modeling
from powernorm.recipes.family import EMBEDDED, Family, RecipeInfo
from powernorm.recipes.language_modeling import DEMO_PENALTIES
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

TASK: Final = "mlm"


def smoke() -> ComparisonConfig:
    """Return a check that everything works, in seconds: too short to compare anything."""
    base = language_modeling.smoke()
    return replace(base, task=TASK, data=replace(base.data, path="rt"))


def demo() -> ComparisonConfig:
    """Return a comparison in minutes on two CPU cores: German verses in small subwords.

    Nothing is learned from the context for the first hundreds of updates, so the subwords are few
    and short, where neighbours say most.
    """
    return ComparisonConfig(
        task=TASK,
        preset="demo",
        norms=("ln", "bn", "rbn", "pn"),
        data=DataConfig(path="verses-de", vocabulary_size=300, sequence_length=48, batch_size=32),
        model=ModelConfig(num_features=64, num_layers=2, num_heads=4, feedforward_features=256),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        training=TrainingConfig(
            max_steps=1000,
            log_every=20,
            validate_every=100,
            validation_tokens=32768,
            monitor_every=50,
            tid_batches=40,
        ),
        norm_options={"rbn": DEMO_PENALTIES},
    )


PRESETS: Final[dict[str, Callable[[], ComparisonConfig]]] = {"smoke": smoke, "demo": demo}

CATALOGUE: Final[dict[str, RecipeInfo]] = {
    "smoke": RecipeInfo("masked language model, a check", EMBEDDED, "half a minute on two cores"),
    "demo": RecipeInfo(
        "masked language model on padded verses", EMBEDDED, "about 4 min on two cores"
    ),
}

FAMILY: Final = Family(TASK, PRESETS, CATALOGUE)
