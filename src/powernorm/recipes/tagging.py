"""Part-of-speech tagging: sentences of unequal length, where padding masks matter."""

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

TASK: Final = "tag"


def smoke() -> ComparisonConfig:
    """Return a check that everything works, in seconds: too short to compare anything."""
    base = language_modeling.smoke()
    return replace(
        base,
        task=TASK,
        data=replace(base.data, path="turkish"),
        training=replace(base.training, max_steps=60, validate_every=30),
    )


def demo() -> ComparisonConfig:
    """Return a comparison in minutes on two CPU cores: parts of speech in Portuguese."""
    return ComparisonConfig(
        task=TASK,
        preset="demo",
        norms=("ln", "bn", "rbn", "pn"),
        data=DataConfig(path="petrogold", vocabulary_size=2000, sequence_length=64, batch_size=32),
        model=ModelConfig(num_features=64, num_layers=2, num_heads=4, feedforward_features=256),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        training=TrainingConfig(
            max_steps=600,
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
    "smoke": RecipeInfo("parts of speech, a check", EMBEDDED, "half a minute on two cores"),
    "demo": RecipeInfo("parts of speech in Portuguese", EMBEDDED, "about 3 min on two cores"),
}

FAMILY: Final = Family(TASK, PRESETS, CATALOGUE)
