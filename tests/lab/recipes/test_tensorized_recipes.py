"""The papers' language model as a recipe: its settings, its numbers, its mark."""

from math import isinf
from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm.lab.recipes import (
    changes_of,
    check_choice,
    named_recipe,
    paper_records,
    recipe,
    reduced_note,
)
from powernorm.lab.settings.overrides import override
from powernorm.lab.tasks.builtin import check_norms

PTB = ("ptb-tensorized-pre", "ptb-tensorized-post")
WIKITEXT = ("wikitext103-tensorized-pre", "wikitext103-tensorized-post")


@pytest.mark.parametrize("preset", [*PTB, *WIKITEXT])
def test_settings_go_together(preset: str) -> None:
    config = recipe("lm", preset)
    check_norms(config)
    assert config.preset == preset
    assert config.placement == preset.rpartition("-")[2]
    assert not config.model.sees_future


@pytest.mark.parametrize("preset", PTB)
def test_penn_treebank_as_in_the_papers(preset: str) -> None:
    config = recipe("lm", preset)
    model, data, training = config.model, config.data, config.training
    assert (model.num_layers, model.num_features, model.feedforward_features) == (3, 256, 2100)
    assert (model.head_features, model.dropout, model.adaptive_cutoffs) == (40, 0.3, ())
    assert (data.sequence_length, data.batch_size, training.max_steps) == (32, 120, 20_000)
    assert (config.optimizer.learning_rate, training.label_smoothing) == (2.5e-4, 0.1)
    assert config.schedule.warmup_fraction * training.max_steps == 4000
    assert training.norm_warmup_fraction * training.max_steps == 4000


@pytest.mark.parametrize("preset", WIKITEXT)
def test_wikitext_as_in_the_papers(preset: str) -> None:
    config = recipe("lm", preset)
    model, data, training = config.model, config.data, config.training
    assert (model.num_layers, model.dropout) == (6, 0.1)
    assert (data.sequence_length, data.batch_size, training.max_steps) == (80, 60, 200_000)
    assert model.adaptive_cutoffs[-1] < data.vocabulary_size == 267_735
    assert config.schedule.warmup_fraction * training.max_steps == 4000
    # Refused with an adaptive softmax.
    with pytest.raises(InputError, match=r"label_smoothing=0\.1 needs the probabilities"):
        check_norms(override(config, ["training.label_smoothing=0.1"]))


@pytest.mark.parametrize(
    ("preset", "penalties"),
    [
        (PTB[0], (0.01, 0)),
        (PTB[1], (0.1, 0.01)),
        (WIKITEXT[0], (0.1, 0)),
        (WIKITEXT[1], (0.1, 0.01)),
    ],
)
def test_penalties_of_appendix_b(preset: str, penalties: tuple[float, float]) -> None:
    options = recipe("lm", preset).norm_options["rbn"]
    assert (options["mean_penalty"], options["var_penalty"]) == penalties


@pytest.mark.parametrize(
    ("preset", "norm", "values"),
    [
        (PTB[0], "ln", [53.2, 54.5]),
        (PTB[0], "pnv", [55.3]),
        (PTB[1], "rbn", [44.6]),
        (WIKITEXT[0], "bn", [27.2, 17.8]),
        (WIKITEXT[1], "bn", [17.2]),
        (WIKITEXT[1], "pn-only", [None]),
    ],
)
def test_numbers_of_the_papers(preset: str, norm: str, values: list[float | None]) -> None:
    records = paper_records(recipe("lm", preset))
    assert [record["value"] for record in records if record["norm"] == norm] == values
    printed = named_recipe("lm", "wikitext103-tensorized-pre").results
    infinite = [one for one in printed if one.value is not None and isinf(one.value)]
    assert all(one.record()["value"] is None for one in infinite)
    assert len(infinite) == 3


@pytest.mark.parametrize("preset", PTB)
def test_note_says_that_the_model_is_masked(preset: str) -> None:
    config = recipe("lm", preset)
    note = str(reduced_note(config))
    assert "code of the same model sees the future; here it is masked" in note
    assert "over subwords, and perplexity is per word" in note
    assert "an embedded one, not the Penn Treebank" in note
    assert "its perplexity is that of no language model" not in note
    config = override(config, ["model.sees_future=true", "norms=ln,bn"])
    seeing = str(reduced_note(config))
    assert seeing.startswith("ln and bn: without the causal mask")
    assert "its perplexity is that of no language model" in seeing
    changes = changes_of(config)
    assert changes is not None
    assert changes["settings"] == {"model.sees_future": {"here": True, "preset": False}}


def test_other_placement_is_another_preset(tmp_path: Path) -> None:
    config = override(recipe("lm", PTB[0]), ["model.placement=post", f"data.path={tmp_path}"])
    with pytest.raises(InputError, match="use --preset ptb-tensorized-post"):
        check_choice(config)


def test_wikitext_needs_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"takes files of your own, wiki\.train\.tokens"):
        check_choice(recipe("lm", WIKITEXT[0]))
