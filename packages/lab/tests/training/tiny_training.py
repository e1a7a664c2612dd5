"""A configuration that trains in a second, and a function that trains it."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.runs import ComparisonResults
from powernorm_lab.settings.comparison import ComparisonSettings, Notes, to_json
from powernorm_lab.settings.data import SubwordDataSettings
from powernorm_lab.settings.training import (
    OptimizerSettings,
    SmoothedTrainingSettings,
)
from powernorm_lab.tasks.builtin import grid_of
from powernorm_lab.tasks.lm.settings import LanguageModelSettings, LanguageModelShape
from powernorm_lab.tasks.registry import settings_from, settings_of

STEPS = {
    "max_steps": 12,
    "log_every": 2,
    "validate_every": 4,
    "monitor_every": 3,
    "tid_batches": 3,
}
TRAINING = SmoothedTrainingSettings(**STEPS)


Configure = Callable[..., ComparisonSettings]
"""Type of the fixture `configure`: `tiny_config` on an existing text."""


def tiny_config(
    path: str,
    *,
    norms: tuple[str, ...] = ("ln",),
    seeds: tuple[int, ...] = (0,),
    dropout: float = 0.1,
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-2),  # noqa: B008
    training: SmoothedTrainingSettings = TRAINING,
    norm_options: dict[str, dict[str, float]] | None = None,
) -> ComparisonSettings:
    return LanguageModelSettings(
        preset="test",
        norms=norms,
        seeds=seeds,
        data=SubwordDataSettings(
            path=path,
            vocabulary_size=300,
            sequence_length=12,
            batch_size=8,
            evaluation_batch_size=16,
        ),
        model=LanguageModelShape(
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


def of_task(task: str, config: ComparisonSettings) -> Any:
    """Return the settings for another task, as far as the task has them."""
    owner, values = settings_of(task), to_json(config)
    for section in ("data", "model", "training"):
        known = {item.name for item in fields(owner.__dataclass_fields__[section].type)}
        values[section] = {k: v for k, v in values[section].items() if k in known}
    return settings_from(values | {"task": task})


def compare(
    config: ComparisonSettings, out: Path, *, notes: Notes | None = None, **how: Any
) -> ComparisonResults:
    """Train a comparison of a built-in task in this process without output."""
    return compare_grid(grid_of(config, notes or Notes()), out, **how)
