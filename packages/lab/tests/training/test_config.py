import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from powernorm.errors import InputError
from powernorm.norms import NORMS, build_norm
from powernorm_lab.engine.warmup import WARMED_UP_NORMS
from powernorm_lab.settings.comparison import options_of, to_json
from powernorm_lab.settings.data import SubwordDataSettings
from powernorm_lab.settings.overrides import known_keys, override
from powernorm_lab.settings.training import (
    OptimizerSettings,
    ScheduleSettings,
    SmoothedTrainingSettings,
)
from powernorm_lab.tasks.lm.settings import LanguageModelSettings, LanguageModelShape
from powernorm_lab.tasks.registry import settings_from
from powernorm_lab.tasks.trained_models import run_config

CONFIG = LanguageModelSettings(
    preset="test", norm_options={"rbn": {"mean_penalty": 1.0}, "pn": {"groups": None}}
)


def test_json_round_trip() -> None:
    text = json.dumps(to_json(CONFIG))
    assert settings_from(json.loads(text)) == CONFIG


@pytest.mark.parametrize(
    ("assignment", "section", "name", "value"),
    [
        ("optimizer.learning_rate=1e-3", "optimizer", "learning_rate", 1e-3),
        ("optimizer.clip_norm=none", "optimizer", "clip_norm", None),
        ("optimizer.clip_norm=2", "optimizer", "clip_norm", 2.0),
        ("training.max_steps = 7", "training", "max_steps", 7),
        ("training.patience=3", "training", "patience", 3),
        ("schedule.name=inverse_sqrt", "schedule", "name", "inverse_sqrt"),
        ("model.placement=post", "model", "placement", "post"),
        ("data.path=some/where=else", "data", "path", "some/where=else"),
    ],
)
def test_override_of_a_field(assignment: str, section: str, name: str, value: object) -> None:
    changed = override(CONFIG, [assignment])
    got = getattr(getattr(changed, section), name)
    assert got == value
    assert type(got) is type(value)
    before, after = to_json(CONFIG), to_json(changed)
    before[section][name] = after[section][name]
    assert before == after, "nothing else changes"


def test_override_of_lists_and_norm_options() -> None:
    changed = override(
        CONFIG,
        [
            "norms=ln, pn,",
            "seeds=3,4",
            "norm_options.rbn.mean_penalty=10",
            "norm_options.rbn.var_penalty=0.5",
            "norm_options.pn.max_ratio=none",
            "norm_options.bn.affine=true",
            "norm_options.pn.variant=released",
            "norm_options.mabn.window=NaN",
            "norm_options.brn.max_d=[1]",
        ],
    )
    assert changed.norms == ("ln", "pn")
    assert changed.seeds == (3, 4)
    assert changed.norm_options == {
        "rbn": {"mean_penalty": 10, "var_penalty": 0.5},
        "pn": {"groups": None, "max_ratio": None, "variant": "released"},
        "bn": {"affine": True},
        "mabn": {"window": "NaN"},
        "brn": {"max_d": "[1]"},
    }
    assert CONFIG.norm_options == {"rbn": {"mean_penalty": 1.0}, "pn": {"groups": None}}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("max_steps", "'max_steps' is not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("learning_rate=1", "did you mean optimizer.learning_rate"),
        ("optimizer.learning_rte=1", r"did you mean optimizer\.learning_rate\?$"),
        ("optimizer.lr=1", r"known are optimizer\.learning_rate, optimizer\.beta1"),
        ("optimiser.learning_rate=1", "did you mean optimizer.learning_rate"),
        ("model.zzz=1", "known are model.num_features, model.num_layers"),
        ("zzz=1", "known are norms, seeds, data.…, model"),
        ("preset=full", "'preset' is not a setting"),
        ("model=3", "'model' is not a setting of the task lm; .*model.num_features"),
        ("training.max_steps=1.5", "training.max_steps=1.5 has the wrong type: .* whole number"),
        ("optimizer.learning_rate=fast", "learning_rate='fast' has the wrong type: expected a num"),
        ("model.activation=silu", "choose one of gelu, relu"),
        ("seeds=1,x", r"seeds\.1='x' has the wrong type: expected a whole number"),
        ("norm_options.pn=3", "write norm_options.NORM.OPTION=value"),
        ("training.max_steps=0", "training.max_steps=0 is too small: give at least 1"),
        ("optimizer.learning_rate=nan", "learning_rate=nan is not finite: give a number"),
        ("optimizer.learning_rate=inf", "learning_rate=inf is not finite: give a number"),
        ("optimizer.learning_rate=0", "is too small: give a number above 0"),
        ("optimizer.weight_decay=-1", "weight_decay=-1 is too small: give at least 0"),
        ("model.dropout=1", "dropout=1 is too large: give a number below 1"),
        ("schedule.warmup_fraction=1.1", "is too large: give at most 1"),
        ("data.vocabulary_size=0", "give at least 257"),
        ("model.num_heads=3", "model.num_heads=3 does not divide model.num_features=128"),
        ("seeds=-1", r"seeds\.0=-1 is too small"),
        (f"model.num_layers={10**30}", r"is too large: give a number below 2\^63"),
        ("seeds=1,1", "seeds names 1 more than once"),
        ("norms=ln,bn,ln", "norms names ln more than once"),
        ("norms=", "norms is empty"),
    ],
)
def test_bad_overrides_are_named(assignment: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        override(CONFIG, [assignment])


@pytest.mark.parametrize(
    "assignments",
    [
        ["model.num_heads=5", "model.num_features=100"],
        ["model.num_features=100", "model.num_heads=5"],
        ["model.num_heads=3", "model.num_features=100", "model.num_heads=5"],
    ],
)
def test_settings_that_fit_each_other_may_come_in_any_order(assignments: list[str]) -> None:
    """Users need not find the only order in which the settings of a wider model are valid."""
    config = override(CONFIG, assignments)
    assert (config.model.num_heads, config.model.num_features) == (5, 100)


def test_the_last_of_several_values_counts() -> None:
    assignments = ["seeds=1,1", "training.max_steps=0", "training.max_steps=7", "seeds=2"]
    config = override(CONFIG, assignments)
    assert (config.seeds, config.training.max_steps) == ((2,), 7)
    with pytest.raises(InputError, match=r"training\.max_steps=0 is too small"):
        override(CONFIG, ["training.max_steps=7", "training.max_steps=0"])


@pytest.mark.parametrize("text", ["none", "()", ""])
def test_several_numbers_can_be_none(text: str) -> None:
    config = override(CONFIG, ["model.adaptive_cutoffs=10,20", "norms=none,ln"])
    assert (config.model.adaptive_cutoffs, config.norms) == ((10, 20), ("none", "ln"))
    assert override(config, [f"model.adaptive_cutoffs={text}"]).model.adaptive_cutoffs == ()


def test_every_known_key_can_be_set() -> None:
    sections = asdict(CONFIG)
    flat = {f"{s}.{k}": v for s, part in sections.items() if isinstance(part, dict)
            for k, v in part.items() if s not in ("norm_options", "study")}  # fmt: skip
    assert set(known_keys(LanguageModelSettings)) == {
        *flat,
        "norms",
        "seeds",
        "norm_options.NORM.OPTION",
    }
    for key, value in flat.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else value
        assert override(CONFIG, [f"{key}={'none' if value is None else text}"]) == CONFIG, key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 3}, "'speed' is not a setting; did you mean seeds"),
        ({"seeds": ["1"]}, r"seeds\.0='1' has the wrong type"),
        ({"norm_options": 3}, "norm_options=3 has the wrong type"),
        ({"model": 3}, "model=3 has the wrong type"),
        (
            {"optimizer": to_json(CONFIG)["optimizer"] | {"eps": 10**400}},
            "optimizer.eps=1000.* has the wrong type: expected a number",
        ),
        ({"seeds": [2**63]}, r"is too large: give a number below 2\^63"),
        ({"task": None}, "task=None has the wrong type: expected a text"),
    ],
)
def test_foreign_json_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings_from(to_json(CONFIG) | change)


@pytest.mark.parametrize("seed", [None, "x", 0.5, float("inf"), 10**30, [1]])
def test_a_run_with_a_damaged_seed(seed: object) -> None:
    """A config.json was edited."""
    settings = to_json(CONFIG) | {"norm": "ln", "norm_options": {}, "seed": seed}
    with pytest.raises(InputError, match=r"seeds\.0=.* (has the wrong type|is too large)"):
        run_config({key: settings[key] for key in settings.keys() - {"norms", "seeds"}})


def test_choices_are_checked_when_built_in_code_too() -> None:
    with pytest.raises(InputError, match=r"schedule\.name=step is not known"):
        ScheduleSettings(name="step")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model\.placement=middle is not known"):
        LanguageModelShape(placement="middle")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"training\.patience=0 is too small"):
        SmoothedTrainingSettings(patience=0)
    with pytest.raises(InputError, match=r"data\.sequence_length=1 is too small"):
        SubwordDataSettings(sequence_length=1)


def test_warmups_of_norms_are_fractions_of_the_run() -> None:
    config = LanguageModelSettings(
        preset="test",
        optimizer=OptimizerSettings(accumulation=2),
        training=SmoothedTrainingSettings(max_steps=300, norm_warmup_fraction=0.1),
        norm_options={"pn": {"groups": 2}, "mabn": {"warmup_steps": 5}},
    )
    # Running statistics move with every micro-batch, so these count micro-batches.
    assert options_of(config, "pn") == {"warmup_steps": 60, "groups": 2}
    assert options_of(config, "brn") == {"warmup_steps": 60, "ramp_steps": 60}
    assert options_of(config, "mabn") == {"warmup_steps": 5, "ratio_start": 60}
    assert options_of(config, "ln") == {}


@pytest.mark.parametrize("norm", NORMS)
def test_resolved_options_fit_every_norm(norm: str) -> None:
    config = LanguageModelSettings(preset="test")
    layer = build_norm(norm, 8, **options_of(config, norm))
    # A norm with a warm-up must be in the table, or its warm-up would outlast the run.
    has_schedule = hasattr(layer, "warmup_steps") or hasattr(layer, "end_step")
    assert has_schedule == (norm in WARMED_UP_NORMS)


def test_configurations_import_nothing_heavy() -> None:
    code = (
        "import sys, powernorm_lab.recipes, powernorm_lab.settings.comparison;"
        "import powernorm_lab.settings.overrides;"
        "print([m for m in ('torch', 'lightning', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
