"""A stream of bytes that a tiny model learns, and a configuration that trains in seconds."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import SequenceDataSettings
from powernorm_lab.settings.training import OptimizerSettings, SmoothedTrainingSettings
from powernorm_lab.tasks.lm_char.settings import CharacterSettings, TransformerXLShape

WORDS = ("war", "peace", "today", "mind", "tond")


def write_stream(folder: Path) -> Path:
    """Write words in an order that a model can learn."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", 6000), ("valid", 611), ("test", 503)):
        text, index = "", 0
        while len(text) < size:
            index = (index + rng.choice((1, 1, 1, 2))) % len(WORDS)
            text += WORDS[index] + " "
        (folder / f"{split}.txt").write_bytes(text[:size].encode())
    return folder


def tiny_characters(path: Path, **changes: Any) -> ComparisonSettings:
    """Return a configuration; keyword arguments change its sections: `model={"dropout": 0.0}`."""
    config = CharacterSettings(
        preset="test",
        norms=("ln",),
        seeds=(0,),
        data=SequenceDataSettings(
            path=str(path), sequence_length=12, batch_size=3, evaluation_batch_size=5
        ),
        model=TransformerXLShape(
            num_features=16,
            num_layers=2,
            num_heads=2,
            feedforward_features=16,
            dropout=0.1,
            placement="post",
            activation="relu",
            memory_length=16,
        ),
        optimizer=OptimizerSettings(learning_rate=1e-2, accumulation=2),
        training=SmoothedTrainingSettings(
            max_steps=12,
            log_every=2,
            validate_every=4,
            validation_tokens=200,
            monitor_every=3,
            tid_batches=3,
        ),
    )
    sections = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
        if name != "norm_options"
    }
    options = changes.get("norm_options", {})
    return replace(config, **sections, norm_options=options)
