"""Presets over bytes have the settings and results of the paper."""

import pytest

from powernorm_lab.recipes import (
    changes_of,
    measure_of,
    paper_records,
    paths_of,
    recipe,
    reduced_note,
)
from powernorm_lab.settings.overrides import override

TASK = "lm-char"


def test_enwik8_of_xu() -> None:
    """Section 2.2."""
    config = recipe(TASK, "enwik8-xu2019")
    model, data, optimizer = config.model, config.data, config.optimizer
    assert (model.num_layers, model.num_features, model.num_heads) == (12, 512, 8)
    assert model.num_features // model.num_heads == 64
    assert (model.dropout, data.batch_size, optimizer.learning_rate) == (0.1, 22, 2.5e-4)
    # The paper refers to Transformer-XL's run on the same data for these.
    assert (data.sequence_length, model.memory_length) == (512, 512)
    assert (model.evaluation_memory_length, model.feedforward_features) == (2100, 2048)
    assert (config.training.max_steps, config.schedule.name) == (400_000, "cosine")
    assert config.schedule.warmup_fraction == 0.0
    assert (optimizer.clip_norm, model.placement) == (0.25, "post")


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_numbers_are_those_of_the_enwiki8_column(placement: str) -> None:
    config = override(recipe(TASK, "enwik8-xu2019"), [f"model.placement={placement}"])
    records = paper_records(config)
    assert {record["norm"]: record["value"] for record in records} == {
        "none": 1.04,
        "ln": 1.07,
        "ln-simple": 1.07,
        "detach-both": 1.12,
        "detach-mean": 1.07,
        "detach-std": 1.10,
        "adanorm": 1.07,
    }
    assert (
        {record["metric"] for record in records}
        == {"test_bits_per_character"}
        == {measure_of(TASK)}
    )


def test_what_is_said_where_it_differs() -> None:
    config = recipe(TASK, "enwik8-xu2019")
    assert (reduced_note(config), changes_of(config)) == (None, None)
    changes = changes_of(override(config, ["training.max_steps=1000"]))
    assert changes is not None
    assert list(changes["settings"]) == ["training.max_steps"]


@pytest.mark.parametrize("preset", paths_of("lm-char"))
def test_a_memory_is_not_shorter_than_a_segment(preset: str) -> None:
    config = recipe(TASK, preset)
    assert config.model.memory_length is not None
    assert config.model.memory_length >= config.data.sequence_length
