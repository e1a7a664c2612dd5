"""What a study is made from, and the sizes that several studies share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from powernorm.lab.recipes.files import named_recipe
from powernorm.lab.settings.comparison import Study, Variant
from powernorm.lab.settings.training import OptimizerSettings, SmoothedTrainingSettings
from powernorm.lab.tasks.lm.settings import LanguageModelSettings, LanguageModelShape
from powernorm.lab.tasks.text_settings import SubwordDataSettings

TASK: Final = "lm"
PRESETS: Final = ("smoke", "demo", "full")
"""Sizes that every study has."""


@dataclass(frozen=True)
class StudyRecipe:
    """A study: a configuration for each preset, and the variants that are made of it.

    Variants are made after the user's settings, so that these are what is varied: with
    `model.num_layers=4` there are five numbers of lowest layers.
    """

    info: Study
    summary: str
    """One line for the command line's help."""
    base: Callable[[str], LanguageModelSettings]
    """The configuration of a preset, without variants."""
    variants: Callable[[LanguageModelSettings], tuple[Variant, ...]]
    """What is trained, given the configuration with the user's settings."""


def sized(preset: str) -> LanguageModelSettings:
    """Return the configuration from which studies start.

    `smoke` is that of the language model. `demo` is smaller than its demo, for a study has many
    runs: about 12 s each on one CPU core. `full` is the Penn-Treebank setting of Shen et al. 2020
    and Wang et al. 2022.
    """
    config = named_recipe(TASK, preset).settings
    assert isinstance(config, LanguageModelSettings)
    if preset != "demo":
        return config
    return replace(
        config,
        data=SubwordDataSettings(
            vocabulary_size=1000, sequence_length=32, batch_size=32, evaluation_batch_size=128
        ),
        model=LanguageModelShape(
            num_features=64, num_layers=2, num_heads=4, feedforward_features=256
        ),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        training=SmoothedTrainingSettings(
            max_steps=600,
            num_threads=1,
            log_every=10,
            validate_every=75,
            validation_tokens=32768,
            monitor_every=20,
            tid_batches=40,
        ),
    )
