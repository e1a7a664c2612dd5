"""Presets on the embedded verses, German to English: they need no data of one's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from powernorm.recipes.translation.shapes import IWSLT_SEARCH, SMALL, TASK, adam
from powernorm.training.config import (
    ComparisonConfig,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    NormOptions,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

EPOCH: Final = 250
"""Updates of 4,096 subwords: about 25,000 pairs with 40 on the longer side."""

WANG_PENALTIES: Final[NormOptions] = {"mean_penalty": 0.1, "var_penalty": 0.01}
"""λ that Wang et al. 2022 (App. B) found for IWSLT14 with pre-norm."""


def smoke() -> ComparisonConfig:
    """Return a check that everything works, in seconds: too short to compare anything."""
    return ComparisonConfig(
        task=TASK,
        preset="smoke",
        norms=("ln", "bn"),
        data=DataConfig(vocabulary_size=500, sequence_length=256, batch_tokens=1024, max_pairs=400),
        model=ModelConfig(num_features=32, num_layers=1, num_heads=2, feedforward_features=64),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(name="inverse_sqrt", warmup_steps=10),
        training=TrainingConfig(
            max_steps=30,
            num_threads=1,
            label_smoothing=0.1,
            log_every=5,
            validate_every=15,
            validation_tokens=4096,
            monitor_every=10,
            tid_batches=5,
            average_checkpoints=2,
            recalibration_batches=5,
        ),
        # An untrained model ends no sentence: what it may say is short.
        decoding=DecodingConfig(beam_size=1, max_length_factor=0.0, max_length_offset=8),
    )


def demo() -> ComparisonConfig:
    """Return a comparison of minutes on two CPU cores: a tiny model on a part of the verses."""
    return ComparisonConfig(
        task=TASK,
        preset="demo",
        norms=("ln", "bn", "rbn", "pn"),
        data=DataConfig(
            vocabulary_size=4000, sequence_length=256, batch_tokens=1200, max_pairs=12000
        ),
        model=ModelConfig(
            num_features=128,
            num_layers=2,
            num_heads=4,
            feedforward_features=512,
            dropout=0.1,
            activation="relu",
        ),
        optimizer=adam(4e-3),
        schedule=ScheduleConfig(name="inverse_sqrt", warmup_steps=60),
        training=TrainingConfig(
            max_steps=450,
            label_smoothing=0.1,
            log_every=10,
            validate_every=90,
            validation_tokens=8192,
            monitor_every=50,
            tid_batches=20,
        ),
        norm_options={"rbn": WANG_PENALTIES, "pn": {"groups": 4}},
        decoding=DecodingConfig(beam_size=2, max_length_factor=1.2, max_length_offset=10),
    )


def verses_small() -> ComparisonConfig:
    """Return the small model of Shen et al. 2020 and Wang et al. 2022 on the verses, for a GPU.

    6 + 6 layers, joint vocabulary of 10,000, 4,096 positions a batch, pre-norm, Adam at 1.5e-3
    after the inverse square root, label smoothing 0.1, weight decay 1e-4, as these papers have it
    on IWSLT14; the final norm is swapped too, and PowerNorm has as many groups as heads (Shen et
    al.). The corpus has about a sixth of the pairs of IWSLT14, so the run is shorter: 60 epochs of
    about 250 updates, with 4,000 of warm-up in place of 8,000 and 500 for the final PowerNorm in
    place of 1,000.
    """
    return ComparisonConfig(
        task=TASK,
        preset="verses-small",
        norms=("ln", "bn", "rbn", "pn"),
        seeds=(0, 1, 2),
        data=DataConfig(vocabulary_size=10000, sequence_length=256, batch_tokens=4096),
        model=replace(SMALL, final_norm_warmup=500),
        optimizer=adam(1.5e-3, weight_decay=1e-4),
        schedule=ScheduleConfig(name="inverse_sqrt", warmup_steps=4000),
        training=TrainingConfig(
            max_steps=60 * EPOCH,
            label_smoothing=0.1,
            log_every=50,
            validate_every=EPOCH,
            monitor_every=100,
            tid_batches=100,
            average_checkpoints=6,
        ),
        norm_options={"rbn": WANG_PENALTIES, "pn": {"groups": 4, "warmup_steps": 4000}},
        decoding=IWSLT_SEARCH,
    )


def verses_reduced() -> ComparisonConfig:
    """Return `verses-small` for two CPU cores: 2 + 2 layers, 128 features, 2,000 updates, 2 seeds.

    Rate and warm-up are those of the smaller model.
    """
    small = verses_small()
    return replace(
        small,
        preset="verses-reduced",
        seeds=(0, 1),
        data=replace(small.data, vocabulary_size=4000, batch_tokens=1500),
        model=replace(
            small.model,
            num_features=128,
            num_layers=2,
            feedforward_features=512,
            dropout=0.1,
            attention_dropout=0.0,
            activation_dropout=0.0,
            final_norm_warmup=40,
        ),
        optimizer=replace(small.optimizer, learning_rate=4e-3),
        schedule=replace(small.schedule, warmup_steps=200),
        training=replace(
            small.training,
            max_steps=2000,
            num_threads=1,
            log_every=20,
            validate_every=200,
            validation_tokens=32768,
            tid_batches=40,
            average_checkpoints=3,
        ),
        norm_options={"rbn": WANG_PENALTIES, "pn": {"groups": 4, "warmup_steps": 300}},
    )


PRESETS: Final[dict[str, Callable[[], ComparisonConfig]]] = {
    "smoke": smoke,
    "demo": demo,
    "verses-small": verses_small,
    "verses-reduced": verses_reduced,
}
