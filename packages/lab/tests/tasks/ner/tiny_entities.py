"""Sentences with names whose kind follows only from the words around them."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.tests.training.tiny_training import STEPS

from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.training import OptimizerSettings, ScoredTrainingSettings
from powernorm_lab.tasks.ner.settings import EntityDataSettings, EntitySettings, EntityTaggerShape

NAMES = ("Adams", "Bergen", "Clare", "Dover", "Essen")


def write_entities(folder: Path) -> Path:
    """Write files of two columns; `mr NAME` and `NAME says` are people, `in NAME` is a place."""
    folder.mkdir()
    rng = random.Random(0)
    for split, number in (("train", 150), ("dev", 40), ("test", 40)):
        blocks = []
        for _ in range(number):
            rows = []
            for _ in range(rng.randrange(1, 4)):
                rows += [f"w{rng.randrange(20)} O" for _ in range(rng.randrange(4))]
                rows += rng.choice((person, place))(rng)
            blocks.append("\n".join(rows))
        (folder / f"{split}.char.bmes").write_text("\n\n".join(blocks) + "\n")
    return folder


def person(rng: random.Random) -> list[str]:
    if rng.random() < 0.5:
        return ["mr O", f"{rng.choice(NAMES)} B-PER", f"{rng.choice(NAMES)} E-PER"]
    return [f"{rng.choice(NAMES)} S-PER", "says O"]


def place(rng: random.Random) -> list[str]:
    return ["in O", f"{rng.choice(NAMES)} S-LOC"]


TRAINING = ScoredTrainingSettings(**STEPS)


def tiny_entities(
    path: Path,
    *,
    norms: tuple[str, ...] = ("ln",),
    seeds: tuple[int, ...] = (0,),
    training: ScoredTrainingSettings = TRAINING,
    norm_options: dict[str, dict[str, float]] | None = None,
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> ComparisonSettings:
    """Return the settings of a comparison that trains in a second."""
    shape = EntityTaggerShape(
        num_features=16,
        num_layers=1,
        num_heads=2,
        feedforward_features=16,
        activation="relu",
        character_features=4,
    )
    read = EntityDataSettings(
        path=str(path), vocabulary_size=300, sequence_length=40, batch_size=10
    )
    return EntitySettings(
        preset="test",
        norms=norms,
        seeds=seeds,
        data=replace(read, **(data or {})),
        model=replace(shape, **(model or {})),
        optimizer=OptimizerSettings(learning_rate=2e-2),
        training=training,
        norm_options=norm_options or {},
    )
