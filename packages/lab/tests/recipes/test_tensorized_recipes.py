"""Recipes of the papers' language model: settings, results and remark."""

from math import isinf
from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm_lab.recipes import (
    changes_of,
    check_choice,
    named_recipe,
    paper_records,
    recipe,
    reduced_note,
)
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.builtin import check_norms
from powernorm_lab.tasks.lm.batches import Segments

PTB = ("ptb-wang2022-pre", "ptb-wang2022-post")
WIKITEXT = ("wikitext103-wang2022-pre", "wikitext103-wang2022-post")
SHEN = ("ptb-shen2020", "wikitext103-shen2020")


@pytest.mark.parametrize("preset", [*PTB, *WIKITEXT, *SHEN])
def test_settings_go_together(preset: str) -> None:
    config = recipe("lm", preset)
    check_norms(config)
    assert config.preset == preset
    assert config.placement == ("post" if preset.endswith("-post") else "pre")
    assert not config.model.sees_future
    assert config.data.vocabulary == "words"


@pytest.mark.parametrize(("preset", "num_words"), [(SHEN[0], 929_589), (SHEN[1], 103_227_021)])
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


@pytest.mark.parametrize("preset", WIKITEXT)
def test_an_adaptive_softmax_has_no_label_smoothing(preset: str) -> None:
    config = recipe("lm", preset)
    with pytest.raises(InputError, match=r"label_smoothing=0\.1 needs the probabilities"):
        check_norms(override(config, ["training.label_smoothing=0.1"]))


@pytest.mark.parametrize(
    ("preset", "norm", "values"),
    [
        ("full", "ln", [53.2, 54.5]),
        (SHEN[0], "ln", [53.2]),
        (SHEN[0], "pnv", [55.3]),
        (SHEN[1], "bn", [27.2]),
        (PTB[0], "ln", [54.5]),
        (PTB[0], "pnv", []),
        (PTB[1], "rbn", [44.6]),
        (WIKITEXT[0], "bn", [17.8]),
        (WIKITEXT[1], "bn", [17.2]),
        (WIKITEXT[1], "pn-only", [None]),
    ],
)
def test_numbers_of_the_papers(preset: str, norm: str, values: list[float | None]) -> None:
    records = paper_records(recipe("lm", preset))
    assert [record["value"] for record in records if record["norm"] == norm] == values
    printed = named_recipe("lm", "wikitext103-wang2022-pre").results
    infinite = [one for one in printed if one.value is not None and isinf(one.value)]
    assert all(one.record()["value"] is None for one in infinite)
    assert len(infinite) == 3


@pytest.mark.parametrize("preset", [*PTB, SHEN[0]])
def test_note_says_that_the_model_is_masked(preset: str) -> None:
    config = recipe("lm", preset)
    note = str(reduced_note(config))
    assert "code of the same model sees the future; here it is masked" in note
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
    with pytest.raises(InputError, match="use --preset ptb-wang2022-post"):
        check_choice(config)


def test_wikitext_needs_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"takes files of your own, wiki\.train\.tokens"):
        check_choice(recipe("lm", WIKITEXT[0]))
