"""A configuration that trains in a second."""

from collections.abc import Callable

from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

TRAINING = TrainingConfig(
    max_steps=12, log_every=2, validate_every=4, monitor_every=3, tid_batches=3
)


Configure = Callable[..., ComparisonConfig]
"""The `configure` fixture: `tiny_config` on a text that is there."""


def tiny_config(
    path: str,
    *,
    norms: tuple[str, ...] = ("ln",),
    seeds: tuple[int, ...] = (0,),
    dropout: float = 0.1,
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2),  # noqa: B008
    training: TrainingConfig = TRAINING,
    norm_options: dict[str, dict[str, float]] | None = None,
) -> ComparisonConfig:
    return ComparisonConfig(
        task="lm",
        preset="test",
        norms=norms,
        seeds=seeds,
        data=DataConfig(
            path=path,
            vocabulary_size=300,
            sequence_length=12,
            batch_size=8,
            evaluation_batch_size=16,
        ),
        model=ModelConfig(
            num_features=16,
            num_layers=1,
            num_heads=2,
            feedforward_features=16,
            dropout=dropout,
        ),
        optimizer=optimizer,
        training=training,
        norm_options=norm_options or {},
    )
