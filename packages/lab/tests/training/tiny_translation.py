"""Sentence pairs that a tiny model learns, and a configuration that trains in a second."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.training import (
    OptimizerSettings,
    ScheduleSettings,
)
from powernorm_lab.tasks.translation.settings import (
    DecodingSettings,
    TranslationDataSettings,
    TranslationSettings,
    TranslationShape,
    TranslationTrainingSettings,
)

ONES = ("null", "eins", "zwei", "drei", "vier", "neun")
OTHERS = ("zero", "one", "two", "three", "four", "nine")


def write_pairs(folder: Path, num_train: int = 120) -> Path:
    """Write numbers in words, 1 to 7 words long, to files like those of WMT."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in (("train", num_train), ("valid", 13), ("test", 11)):
        rows = [[rng.randrange(6) for _ in range(rng.randint(1, 7))] for _ in range(number)]
        for language, words in (("de", ONES), ("en", OTHERS)):
            lines = (" ".join(words[digit] for digit in row) for row in rows)
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def tiny_translation(path: Path, **changes: Any) -> ComparisonSettings:
    """Return a configuration; keyword arguments change its sections: `model={"dropout": 0.0}`."""
    config = TranslationSettings(
        preset="test",
        norms=("ln",),
        seeds=(0,),
        data=TranslationDataSettings(
            path=str(path),
            languages="de-en",
            vocabulary_size=290,
            sequence_length=32,
            batch_tokens=48,
        ),
        model=TranslationShape(
            num_features=16,
            num_layers=1,
            num_heads=2,
            feedforward_features=16,
            dropout=0.1,
            attention_dropout=0.1,
            activation="relu",
        ),
        optimizer=OptimizerSettings(learning_rate=1e-2, accumulation=2, clip_norm=None),
        schedule=ScheduleSettings(name="inverse_sqrt", warmup_steps=5),
        training=TranslationTrainingSettings(
            max_steps=12,
            log_every=2,
            validate_every=4,
            monitor_every=3,
            tid_batches=3,
            label_smoothing=0.1,
            accelerator="cpu",
        ),
        decoding=DecodingSettings(beam_size=2, max_length_offset=3),
    )
    for name, change in changes.items():
        part = getattr(config, name)
        config = replace(config, **{name: replace(part, **change) if name in SECTIONS else change})
    return config


SECTIONS = ("data", "model", "optimizer", "schedule", "training", "decoding")


def short_translation(path: Path) -> ComparisonSettings:
    """Return settings of six updates of PowerNorm, with a validation after every second one."""
    return tiny_translation(
        path,
        norms=("pn",),
        optimizer={"accumulation": 1},
        training={
            "max_steps": 6,
            "log_every": 1,
            "validate_every": 2,
            "monitor_every": 2,
            "average_checkpoints": 2,
            "recalibration_batches": 2,
            "tid_batches": 2,
        },
        decoding={"beam_size": 1},
    )
