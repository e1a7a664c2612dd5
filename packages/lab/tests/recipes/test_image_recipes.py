"""Settings and results of the papers' experiments with images."""

import pytest

from powernorm.norms import NORMS
from powernorm_lab.recipes import paper_records, recipe, reduced_note
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.training.optimization import rate_factor


def test_the_experiment_of_xu_et_al() -> None:
    """2.2: "The batch size is 32. We use optimizer Adam with a learning rate of 0.001 … We train
    the model for 20 epochs."
    """
    config = recipe("image", "mnist-xu2019")
    assert config.model.architecture == "convnet"
    assert config.data.batch_size == 32
    assert config.training.max_steps * config.data.batch_size == 20 * 55_000
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("adam", 1e-3)
    assert config.schedule.name == "constant"
    assert config.schedule.warmup_fraction == 0
    assert config.optimizer.clip_norm is None
    assert len(config.seeds) == 5
    assert options_of(config, "adanorm") == {}


def test_column_of_xu_et_al() -> None:
    config = recipe("image", "mnist-xu2019")
    records = {record["norm"]: record for record in paper_records(config)}
    assert {name: record["value"] for name, record in records.items()} == {
        "none": 99.14,
        "ln": 99.13,
        "ln-simple": 99.09,
        "detach-both": 99.10,
        "detach-mean": 99.25,
        "detach-std": 99.10,
        "adanorm": 99.35,
    }
    # "AdaNorm outperforms LayerNorm … 0.22 ACC on MNIST", "-0.04" of DetachNorm in Table 2
    values = {name: record["value"] or 0 for name, record in records.items()}
    assert values["adanorm"] - values["ln"] == pytest.approx(0.22)
    assert values["detach-both"] - values["none"] == pytest.approx(-0.04)
    assert {record["metric"] for record in records.values()} == {"test_accuracy"}
    assert set(records) == {variant.label for variant in config.variants}
    assert {variant.norm for variant in config.variants} <= set(NORMS)
    assert reduced_note(config) is None


def test_residual_networks() -> None:
    """He et al. 2016, 4.2: "a mini-batch size of 128 … learning rate of 0.1, divide it by 10 at 32k
    and 48k iterations, and terminate training at 64k", weight decay 0.0001, momentum 0.9.
    """
    config = recipe("image", "cifar10-resnet20")
    assert config.model.architecture == "resnet20"
    optimizer, schedule = config.optimizer, config.schedule
    assert (optimizer.name, optimizer.learning_rate, optimizer.momentum) == ("sgd", 0.1, 0.9)
    assert optimizer.weight_decay == 1e-4
    steps = config.training.max_steps
    after = [rate_factor(schedule, step, steps) for step in (32_000, 48_000)]
    before = [rate_factor(schedule, step - 1, steps) for step in (32_000, 48_000)]
    assert before + after == pytest.approx([1, 0.1, 0.1, 0.01])
    assert (steps, config.data.batch_size, config.data.augmentation) == (64_000, 128, True)
    assert recipe("image", "cifar10-resnet18").model.architecture == "resnet18"
    (record,) = paper_records(config)
    assert record["value"] == pytest.approx(100 - 8.75)
