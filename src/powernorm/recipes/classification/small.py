"""Presets of seconds and minutes, on the embedded sentences of RT."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from powernorm.recipes.classification.xu2019 import EPOCH, MODEL, TASK
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

DEMO_PENALTIES: Final = {"mean_penalty": 0.1, "var_penalty": 1.0}


def smoke() -> ComparisonConfig:
    """Return a check that everything works, in seconds: too short to compare anything."""
    return ComparisonConfig(
        task=TASK,
        preset="smoke",
        norms=("ln", "bn"),
        data=DataConfig(vocabulary_size=2000, sequence_length=64, batch_tokens=2048, path="rt"),
        model=ModelConfig(num_features=32, num_layers=1, num_heads=2, feedforward_features=64),
        optimizer=OptimizerConfig(learning_rate=1e-2, beta2=0.998),
        training=TrainingConfig(
            max_steps=40,
            num_threads=1,
            log_every=5,
            validate_every=20,
            monitor_every=10,
            tid_batches=5,
        ),
    )


def demo() -> ComparisonConfig:
    """Return a comparison in minutes on two CPU cores: RT, two layers, six epochs."""
    return ComparisonConfig(
        task=TASK,
        preset="demo",
        norms=("ln", "ln-simple", "adanorm", "bn", "rbn", "pn"),
        data=DataConfig(path="rt", vocabulary_size=20_000, sequence_length=64, batch_tokens=4096),
        model=replace(
            MODEL,
            num_features=64,
            num_layers=2,
            feedforward_features=64,
            embedding_dropout=0.2,
            output_dropout=0.0,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, beta2=0.998),
        training=TrainingConfig(
            max_steps=6 * EPOCH,
            log_every=EPOCH // 4,
            validate_every=EPOCH,
            monitor_every=EPOCH // 2,
            tid_batches=30,
        ),
        norm_options={"rbn": DEMO_PENALTIES},
    )


PRESETS: Final[dict[str, Callable[[], ComparisonConfig]]] = {"smoke": smoke, "demo": demo}
