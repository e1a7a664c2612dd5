"""Recipes have the settings that the papers state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from powernorm.errors import InputError
from powernorm_lab.recipes import named_recipe, paths_of, recipe
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.settings.overrides import override
from powernorm_lab.settings.variants import lines_of
from powernorm_lab.tasks.builtin import check_norms
from powernorm_lab.tasks.classify.sources import load_texts
from powernorm_lab.tasks.lm.data import Segments
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.training.optimization import rate_factor

# Xu et al. 2019, 2.2: "We use optimizer Adam with a learning rate of 0.001".
XU = {"optimizer.name": "adam", "optimizer.learning_rate": 1e-3, "optimizer.clip_norm": None}
XU |= {"schedule.name": "constant"}
# "The dimension of the hidden state is 512, the batch size is 1,024, the dropout rate is 0.2."
PARSING = {"model.num_features": 512, "model.dropout": 0.2, "data.batch_size": 1024}
# Wang et al. 2022, App. A: "two and four layers … SGD optimizer with 0.9 momentum and 1% total
# steps as warmup"; App. B: (0.01, 0) of each sentence for both data sets and placements.
ENTITIES = {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "schedule.warmup_fraction": 0.01}
CONLL = {"model.num_layers": 2, "model.num_features": 14 * 128, "model.bigram_features": None}
# Yan et al. 2019 drop fewer of the characters than of the words.
CONLL |= {"model.character_dropout": 0.3}
RESUME = {"model.num_layers": 4, "model.num_features": 4 * 64, "model.bigram_features": 50}
RESUME |= {"model.character_dropout": None, "model.character_features": None}
# Masked, and before its softmax over words.
WORDS = {"model.sees_future": False, "data.vocabulary": "words"}
KAIMING = {"model.decoder_norm": "same", "model.initialization": "kaiming"}

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("image", "mnist-xu2019"): {
        **XU,
        "model.architecture": "convnet",
        "data.batch_size": 32,
        "schedule.warmup_fraction": 0,
    },
    ("parse", "petrogold"): XU | PARSING,
    ("parse", "ptb-xu2019"): XU | PARSING,
    ("lm-char", "enwik8-xu2019"): {
        "model.num_layers": 12,
        "model.num_features": 512,
        "model.num_heads": 8,
        "model.dropout": 0.1,
        "data.batch_size": 22,
        "optimizer.learning_rate": 2.5e-4,
        # The paper refers to Transformer-XL's run on the same data for these.
        "data.sequence_length": 512,
        "model.memory_length": 512,
        "model.evaluation_memory_length": 2100,
        "model.feedforward_features": 2048,
        "training.max_steps": 400_000,
        "schedule.name": "cosine",
        "schedule.warmup_fraction": 0.0,
        "optimizer.clip_norm": 0.25,
        "model.placement": "post",
    },
    # He et al. 2016, 4.2: "a mini-batch size of 128 … learning rate of 0.1 … terminate training at
    # 64k", weight decay 0.0001, momentum 0.9.
    ("image", "cifar10-resnet20"): {
        "model.architecture": "resnet20",
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.1,
        "optimizer.momentum": 0.9,
        "optimizer.weight_decay": 1e-4,
        "training.max_steps": 64_000,
        "data.batch_size": 128,
        "data.augmentation": True,
    },
    ("image", "cifar10-resnet18"): {"model.architecture": "resnet18"},
    **{("ner", f"conll-wang2022-{one}"): ENTITIES | CONLL for one in ("pre", "post")},
    **{("ner", f"resume-wang2022-{one}"): ENTITIES | RESUME for one in ("pre", "post")},
    **{("translation", f"{data}-xu2019"): KAIMING for data in ("iwslt14", "wmt14", "iwslt15")},
    **{
        ("lm", f"{data}-{paper}"): WORDS
        for data in ("ptb", "wikitext103")
        for paper in ("wang2022-pre", "wang2022-post", "shen2020")
    },
}


@pytest.mark.parametrize(("task", "preset"), SETTINGS)
def test_settings_are_those_of_the_paper(task: str, preset: str) -> None:
    config = recipe(task, preset)
    found = {}
    for key in SETTINGS[task, preset]:
        section, _, name = key.partition(".")
        found[key] = getattr(getattr(config, section), name)
    assert found == SETTINGS[task, preset]
    assert config.placement == ("post" if preset.endswith("post") or task == "lm-char" else "pre")
    if preset in ("mnist-xu2019", "ptb-xu2019", "petrogold"):
        assert len(config.seeds) == 5


@pytest.mark.parametrize(
    ("task", "preset", "epochs", "examples"),
    [
        # "We train the model for 20 epochs."
        ("image", "mnist-xu2019", 20, 55_000),
        # Two transitions per word of projective trees: 1,900,056 in sections 2-21.
        ("parse", "petrogold", 10, 349_456),
        ("parse", "ptb-xu2019", 10, 1_900_056),
        ("ner", "conll-wang2022-pre", 100, 14041),
        ("ner", "conll-wang2022-post", 100, 14041),
        ("ner", "resume-wang2022-pre", 50, 3821),
        ("ner", "resume-wang2022-post", 50, 3821),
    ],
)
def test_runs_have_the_epochs_of_the_paper(
    task: str, preset: str, epochs: int, examples: int
) -> None:
    config = recipe(task, preset)
    trained = config.training.max_steps * config.data.batch_size
    assert trained / examples == pytest.approx(epochs, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "num_words"), [("ptb-shen2020", 929_589), ("wikitext103-shen2020", 103_227_021)]
)
def test_shen_et_al_train_30_epochs_after_4000_steps_of_warmup(preset: str, num_words: int) -> None:
    config = recipe("lm", preset)
    length, rows = config.data.sequence_length, config.data.batch_size
    order = Segments(num_words, length=length, batch_size=rows, seed=0)
    assert config.training.max_steps == 30 * order.batches_per_epoch
    assert config.schedule.warmup_steps == 4000
    assert options_of(config, "pn")["warmup_steps"] == 4000
    assert config.model.dropout == 0.3
    # Layer-scale precedes every norm with batch statistics that the paper compares.
    assert all(options_of(config, norm)["groups"] == 1 for norm in config.norms if norm != "ln")


def test_epochs_are_those_of_the_embedded_set() -> None:
    config = recipe("classify", "rt-xu2019")
    task = task_of(config)
    epoch = task.data(task.encode(config), config, 0).batches.batches_per_epoch
    assert config.training.validate_every == epoch
    assert config.training.max_steps % epoch == 0
    assert load_texts(config.data.path).name == "rt"


def test_rates_of_the_residual_networks() -> None:
    """He et al. 2016, 4.2: "divide it by 10 at 32k and 48k iterations"."""
    config = recipe("image", "cifar10-resnet20")
    at = (31_999, 47_999, 32_000, 48_000)
    rates = [rate_factor(config.schedule, step, config.training.max_steps) for step in at]
    assert rates == pytest.approx([1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize("preset", [one for one in paths_of("ner") if "wang2022" in one])
def test_penalties_of_entities_are_of_each_sentence(preset: str) -> None:
    """The penalty is divided by the sentences of a batch."""
    config = recipe("ner", preset)
    penalties = config.norm_options["rbn"]
    assert penalties["mean_penalty"] == pytest.approx(0.01 * config.data.batch_size)
    assert penalties["var_penalty"] == 0
    assert config.norm_options["pn"]["warmup_steps"] == 4000
    assert (config.model.character_features is not None) == preset.startswith("conll")


@pytest.mark.parametrize(
    ("task", "preset"), [(task, preset) for task in TASKS for preset in paths_of(task)]
)
def test_warmups_of_norms_end_within_the_run(task: str, preset: str) -> None:
    config = recipe(task, preset)
    num_batches = config.training.max_steps * config.optimizer.accumulation
    for norm in ("pn", "pn-only", "pn-static", "brn", "mabn"):
        warmup = options_of(config, norm)["warmup_steps"]
        assert isinstance(warmup, int)
        assert 0 < warmup < 0.6 * num_batches


@pytest.mark.parametrize("preset", paths_of("lm-char"))
def test_a_memory_is_not_shorter_than_a_segment(preset: str) -> None:
    config = recipe("lm-char", preset)
    assert config.model.memory_length is not None
    assert config.model.memory_length >= config.data.sequence_length


@pytest.mark.parametrize("preset", ["wikitext103-wang2022-pre", "wikitext103-wang2022-post"])
def test_an_adaptive_softmax_has_no_label_smoothing(preset: str) -> None:
    config = recipe("lm", preset)
    with pytest.raises(InputError, match=r"label_smoothing=0\.1 needs the probabilities"):
        check_norms(override(config, ["training.label_smoothing=0.1"]))


@pytest.mark.parametrize("preset", ["iwslt14-xu2019", "wmt14-xu2019", "iwslt15-xu2019"])
def test_variants_of_xu_et_al(preset: str) -> None:
    assert options_of(recipe("image", "mnist-xu2019"), "adanorm") == {}
    config = recipe("translation", preset)
    lines = {line.name: options_of(line.settings, line.norm) for line in lines_of(config)}
    assert lines["adanorm"] == {"scale": 2.0}
    assert lines["detach-mean"] == {"detach_mean": True, "detach_std": False}
    assert lines["detach-std"] == {"detach_mean": False, "detach_std": True}
    assert set(lines) == {row.norm for row in named_recipe("translation", preset).results}

    def names(*norms: str) -> list[str]:
        return [line.name for line in lines_of(replace(config, norms=norms))]

    assert names("ln", "detach") == ["ln", "detach-both", "detach-mean", "detach-std"]
    assert names("ln", "detach-mean") == ["ln", "detach-mean"]
    with pytest.raises(InputError, match=rf"the preset {preset} has no variant of rms; choose"):
        replace(config, norms=("rms",))
