"""The presets of translation have the papers' settings, and the papers' numbers are the papers'."""

from dataclasses import replace

import pytest

from powernorm.errors import InputError
from powernorm.lab.recipes import named_recipe, paths_of, recipe
from powernorm.lab.recipes.paper_results import PaperResult
from powernorm.lab.settings.comparison import ComparisonSettings, options_of
from powernorm.lab.settings.variants import lines_of
from powernorm.norms import NORMS

TASK = "translation"
PAPERS = [preset for preset in paths_of(TASK) if preset.partition("-")[0] not in ("smoke", "demo")]


def of(preset: str) -> ComparisonSettings:
    return recipe(TASK, preset)


def values(preset: str, placement: str = "pre") -> dict[str, float | None]:
    rows = [row for row in named_recipe(TASK, preset).results if row.placement == placement]
    assert len({row.norm for row in rows}) == len(rows)
    return {row.norm: row.value for row in rows}


def test_presets() -> None:
    assert set(paths_of(TASK)) == {
        *("smoke", "demo", "verses-small", "verses-reduced"),
        *("verses-mini-pre", "verses-mini-post"),
        *("iwslt14-shen2020", "wmt14-shen2020"),
        *(f"{data}-wang2022-{place}" for data in ("iwslt14", "wmt16") for place in ("pre", "post")),
        *("iwslt14-xu2019", "wmt14-xu2019", "iwslt15-xu2019"),
    }
    assert {name for name in paths_of(TASK) if named_recipe(TASK, name).results} == set(PAPERS)


@pytest.mark.parametrize("preset", paths_of(TASK))
def test_every_preset_is_of_sentence_pairs(preset: str) -> None:
    config = of(preset)
    assert config.data.batch_tokens is not None
    assert config.schedule.name == "inverse_sqrt"
    assert config.schedule.warmup_steps is not None
    assert config.schedule.warmup_steps < config.training.max_steps
    assert config.training.label_smoothing == 0.1
    assert config.optimizer.beta2 == 0.98
    # Own data are tokens in languages that are named; the embedded verses are neither.
    assert config.data.tokenized == (config.data.path is not None)
    assert (config.data.languages is None) == (config.data.path is None)


@pytest.mark.parametrize("preset", PAPERS)
def test_papers_are_repeated_as_they_say(preset: str) -> None:
    config = of(preset)
    assert config.optimizer.clip_norm is None
    assert config.training.average_checkpoints > 1
    snapshots = config.training.max_steps // config.training.validate_every
    assert config.training.average_checkpoints <= snapshots
    for norm in ("pn", "mabn", "brn"):
        warmup = options_of(config, norm)["warmup_steps"]
        assert isinstance(warmup, int)
        micro_batches = config.training.max_steps * config.optimizer.accumulation
        assert 0 < warmup <= micro_batches / 2


def test_small_model_of_shen_and_wang() -> None:
    for preset in ("iwslt14-shen2020", "iwslt14-wang2022-pre", "verses-small", "iwslt14-xu2019"):
        model = of(preset).model
        sizes = (model.num_features, model.num_layers, model.num_heads, model.feedforward_features)
        assert sizes == (512, 6, 4, 1024)
        dropouts = (model.dropout, model.attention_dropout, model.activation_dropout)
        assert dropouts == (0.3, 0.1, 0.1)
        assert (model.num_decoder_layers, model.activation) == (None, "relu")


def test_shen() -> None:
    small, big = of("iwslt14-shen2020"), of("wmt14-shen2020")
    for config, heads in ((small, 4), (big, 16)):
        assert config.model.num_heads == heads
        assert config.norm_options["pn"] == {"groups": heads, "warmup_steps": 8000}
        assert config.norm_options["bn"] == config.norm_options["pnv"] == {"groups": heads}
        assert config.model.final_norm_warmup == 1000
        assert config.model.final_norm is None
        assert (config.placement, config.model.decoder_norm) == ("pre", "ln")
        assert config.training.average_checkpoints == 10
    assert (small.training.max_steps, big.training.max_steps) == (100_000, 300_000)
    assert (small.decoding.beam_size, small.decoding.length_penalty) == (5, 1.0)
    assert (big.decoding.beam_size, big.decoding.length_penalty) == (4, 0.6)
    assert (small.data.vocabulary_size, big.data.vocabulary_size) == (10_000, 37_000)


@pytest.mark.parametrize(
    ("preset", "penalties"),
    [
        ("iwslt14-wang2022-post", (10, 0)),
        ("iwslt14-wang2022-pre", (0.1, 0.01)),
        ("wmt16-wang2022-post", (100, 0)),
        ("wmt16-wang2022-pre", (0.1, 0)),
    ],
)
def test_wang(preset: str, penalties: tuple[float, float]) -> None:
    config = of(preset)
    rbn = config.norm_options["rbn"]
    assert (rbn["mean_penalty"], rbn["var_penalty"]) == penalties
    placement = preset.rpartition("-")[2]
    assert config.placement == placement
    # A pre-norm encoder ends in LayerNorm; a post-norm one has no final norm.
    assert config.model.final_norm == ("ln" if placement == "pre" else None)
    assert config.optimizer.learning_rate == (1.5e-3 if placement == "pre" else 5e-4)
    assert config.schedule.warmup_steps == 8000
    assert config.training.average_checkpoints == 6
    epochs = config.training.max_steps / config.training.validate_every
    assert epochs == (60 if preset.startswith("iwslt14") else 20)
    # One device, or two with four batches of their own in an update.
    batches = (4096, 1) if preset.startswith("iwslt14") else (8192, 8)
    assert (config.data.batch_tokens, config.optimizer.accumulation) == batches


@pytest.mark.parametrize(
    ("preset", "pn", "epoch", "ramp"),
    [
        ("iwslt14-wang2022-pre", 4000, 1100, 4000),
        # 1,000 updates of the 4 forward passes of a device; an epoch and a ramp of 8 in an update.
        ("wmt16-wang2022-pre", 8000, 8 * 2200, 8 * 4000),
    ],
)
def test_warmups_of_wang_count_forward_passes(preset: str, pn: int, epoch: int, ramp: int) -> None:
    config = of(preset)
    for norm in ("pn", "pn-only"):
        assert options_of(config, norm)["warmup_steps"] == pn
    renorm = options_of(config, "brn")
    assert (renorm["warmup_steps"], renorm["ramp_steps"]) == (epoch, ramp)
    micro_batches = config.training.max_steps * config.optimizer.accumulation
    assert epoch + ramp < micro_batches


@pytest.mark.parametrize(
    ("preset", "limits"),
    [
        # Words of the files are cleaned already, their subwords are not.
        *((f"iwslt14-{paper}", (1024, None)) for paper in ("shen2020", "wang2022-pre", "xu2019")),
        # 1 to 250 subwords and the end mark.
        *((f"wmt14-{paper}", (251, 1.5)) for paper in ("shen2020", "xu2019")),
        *((preset, (1024, None)) for preset in ("wmt16-wang2022-pre", "iwslt15-xu2019")),
    ],
)
def test_pairs_that_are_left_out(preset: str, limits: tuple[int, float | None]) -> None:
    data = of(preset).data
    assert (data.sequence_length, data.max_length_ratio) == limits


@pytest.mark.parametrize("preset", ["iwslt14-xu2019", "wmt14-xu2019", "iwslt15-xu2019"])
def test_xu(preset: str) -> None:
    config = of(preset)
    assert config.model.decoder_norm == "same"
    assert config.model.initialization == "kaiming"
    assert config.study is None
    lines = {line.label: options_of(line.config, line.norm) for line in lines_of(config)}
    assert lines["adanorm"] == {"scale": 2.0}
    assert lines["detach-mean"] == {"detach_mean": True, "detach_std": False}
    assert lines["detach-std"] == {"detach_mean": False, "detach_std": True}
    assert set(lines) == set(values(preset))
    some = replace(config, norms=("ln", "detach"))
    assert [line.label for line in lines_of(some)] == [
        "ln",
        "detach-both",
        "detach-mean",
        "detach-std",
    ]
    some = replace(config, norms=("ln", "detach-mean"))
    assert [line.label for line in lines_of(some)] == ["ln", "detach-mean"]
    with pytest.raises(InputError, match=rf"the preset {preset} has no variant of rms; choose"):
        replace(config, norms=("rms",))


def test_two_vocabularies_of_english_and_vietnamese() -> None:
    config = of("iwslt15-xu2019")
    assert (config.data.vocabulary_size, config.data.target_vocabulary_size) == (7669, 6669)
    assert config.model.shared_embeddings == "none"


def test_table_of_shen() -> None:
    assert values("iwslt14-shen2020") == {"ln": 35.5, "bn": 34.4, "pnv": 35.5, "pn": 35.9}
    assert values("wmt14-shen2020") == {"ln": 29.5, "bn": 28.1, "pnv": 28.5, "pn": 30.1}
    # "PN outperforms LN by 0.4/0.6 BLEU"; BatchNorm is 1.1 and 1.4 below LayerNorm.
    for preset, better, worse in (("iwslt14-shen2020", 0.4, 1.1), ("wmt14-shen2020", 0.6, 1.4)):
        rows = {norm: value or 0.0 for norm, value in values(preset).items()}
        assert rows["pn"] - rows["ln"] == pytest.approx(better)
        assert rows["ln"] - rows["bn"] == pytest.approx(worse)


def test_tables_of_wang() -> None:
    assert values("iwslt14-wang2022-post", "post") == {
        "ln": 35.5, "bn": 34.0, "rbn": 35.5, "pn-only": 0, "pn": 35.6, "brn": 35.3, "mabn": 0,
    }  # fmt: skip
    assert values("iwslt14-wang2022-pre", "pre") == {
        "ln": 35.5, "bn": 34.8, "rbn": 35.6, "pn-only": 34.5, "pn": 35.6, "brn": 35.2, "mabn": 35.0,
    }  # fmt: skip
    assert values("wmt16-wang2022-post", "post") == {
        "ln": 27.3, "bn": 25.0, "rbn": 26.5, "pn-only": 0, "pn": 0, "brn": 25.8, "mabn": 0,
    }  # fmt: skip
    assert values("wmt16-wang2022-pre", "pre") == {
        "ln": 27.3, "bn": 25.2, "rbn": 26.2, "pn-only": 26.0, "pn": 27.2, "brn": 25.3, "mabn": 26.8,
    }  # fmt: skip


def test_tables_of_xu() -> None:
    assert values("wmt14-xu2019") == {
        "none": None, "ln": 28.3, "ln-simple": 28.4, "detach-both": None,
        "detach-mean": 28.3, "detach-std": None, "adanorm": 28.5,
    }  # fmt: skip
    assert values("iwslt14-xu2019") == {
        "none": 34.0, "ln": 35.5, "ln-simple": 35.5, "detach-both": 33.9,
        "detach-mean": 35.6, "detach-std": 34.2, "adanorm": 35.6,
    }  # fmt: skip
    assert values("iwslt15-xu2019") == {
        "none": 28.4, "ln": 31.2, "ln-simple": 31.6, "detach-both": 27.7,
        "detach-mean": 31.3, "detach-std": 29.8, "adanorm": 31.4,
    }  # fmt: skip


@pytest.mark.parametrize("preset", PAPERS)
def test_paper_results_name_norms_that_can_be_run(preset: str) -> None:
    config = of(preset)
    known = set(NORMS) | {variant.label for variant in config.variants}
    for row in named_recipe(TASK, preset).results:
        assert isinstance(row, PaperResult)
        assert row.norm in known
        forms = ("test_bleu_tokenised", "test_bleu_lowercase")
        assert row.metric in (("test_bleu_compound",) if config.data.split_compounds else forms)
        assert "Table" in row.source
