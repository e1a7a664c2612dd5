from collections import Counter

import pytest

from powernorm.errors import InputError
from powernorm.recipes.verdict import PRESETS, verdict_study
from powernorm.training.comparison import check_norms
from powernorm.training.config import early_step, options_of


@pytest.mark.parametrize("preset", PRESETS)
def test_settings_can_be_built_and_are_diagnosed_within_a_tenth(preset: str) -> None:
    study = verdict_study(preset)
    assert len({setting.name for setting in study.settings}) == len(study.settings)
    for setting in study.settings:
        check_norms(setting.config)
        step = early_step(setting.config)
        assert step is not None
        assert step <= setting.config.training.max_steps / 10
    assert {norm for phase in study.phases for norm in phase.norms} >= {"ln", "bn"}


@pytest.mark.parametrize("preset", ["demo", "full"])
def test_what_is_known_to_matter_is_balanced(preset: str) -> None:
    configs = [setting.config for setting in verdict_study(preset).settings]
    assert len(configs) == 32
    assert Counter(config.task for config in configs) == {"lm": 16, "tag": 16}
    assert Counter(config.model.placement for config in configs) == {"pre": 16, "post": 16}
    rows = Counter(config.data.batch_size for config in configs)
    assert rows == {2: 2, 4: 6, 8: 8, 16: 8, 32: 4, 64: 4}
    assert set(Counter(setting.group for setting in verdict_study(preset).settings).values()) == {8}


def test_every_eight_settings_have_both_placements_and_all_texts() -> None:
    settings = verdict_study("demo").settings
    for first in range(0, 32, 8):
        part = settings[first : first + 8]
        assert {setting.group for setting in part} == {s.group for s in settings}
        assert Counter(setting.config.model.placement for setting in part) == {"pre": 4, "post": 4}
        assert len({setting.config.model.num_layers for setting in part}) == 3


def test_all_norms_of_a_setting_share_everything_but_the_norm() -> None:
    for setting in verdict_study("demo").settings:
        assert set(setting.config.norm_options) == {"rbn"}
        # PowerNorm's own warm-up ends where the early diagnosis is made.
        warmup = options_of(setting.config, "pn")["warmup_steps"]
        assert warmup == early_step(setting.config)


def test_assignments_reach_every_setting() -> None:
    study = verdict_study("smoke", ("training.max_steps=7", "optimizer.learning_rate=1e-3"))
    for setting in study.settings:
        assert setting.config.training.max_steps == 7
        assert setting.config.optimizer.learning_rate == 1e-3


def test_unknown_presets_and_settings_are_refused() -> None:
    with pytest.raises(InputError, match="verdict has no preset 'big': choose one of smoke, demo"):
        verdict_study("big")
    with pytest.raises(InputError, match="'learning_rate' is not a setting"):
        verdict_study("smoke", ("learning_rate=1",))
