"""Published results that are shown with a comparison."""

import json

import pytest

from powernorm_lab.recipes import (
    changes_of,
    measure_of,
    named_recipe,
    paper_records,
    paths_of,
    recipe,
    reduced_note,
)
from powernorm_lab.recipes.files import EMBEDDED
from powernorm_lab.recipes.studies import study_config
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks import TASKS

ALL = [
    (task, preset)
    for task, presets in ((task, paths_of(task)) for task in TASKS)
    for preset in presets
]
WITHOUT_SCORES = [("image", "cifar10-resnet18"), ("image", "mnist-resnet20"), ("lm", "addresses")]
"""Recipes whose experiments have no published scores."""


@pytest.mark.parametrize(("task", "preset"), ALL)
def test_records_can_stand_in_results(task: str, preset: str) -> None:
    config = recipe(task, preset)
    records = paper_records(config)
    # The results are JSON, which has no infinity.
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert {record["placement"] for record in records} <= {config.placement}
    is_experiment = preset not in ("smoke", "demo")
    assert bool(records) == (is_experiment and (task, preset) not in WITHOUT_SCORES)
    if not is_experiment:
        assert reduced_note(config) == named_recipe(task, preset).about.note
    changes = changes_of(config)
    assert (changes and changes["preset"]) == named_recipe(task, preset).about.stands_for


def test_records_follow_the_placement() -> None:
    config = override(
        recipe("translation", "iwslt14-wang2022-pre"),
        ["model.placement=post", "model.final_norm=none", "norms=mabn"],
    )
    records = {record["norm"]: record["value"] for record in paper_records(config)}
    assert (records["mabn"], records["bn"]) == (0.0, 34.0)


@pytest.mark.parametrize(
    ("preset", "metric"),
    [
        ("iwslt14-shen2020", "test_bleu_lowercase"),  # "case-insensitive BLEU for … IWSLT14 De-En"
        ("wmt14-shen2020", "test_bleu_tokenised"),  # "tokenized case-sensitive … for WMT14 En-De"
        ("iwslt14-wang2022-post", "test_bleu_tokenised"),  # "case sensitive tokenized BLEU"
        ("wmt16-wang2022-pre", "test_bleu_tokenised"),
        ("iwslt14-xu2019", "test_bleu_tokenised"),  # "BLEU", no more is said
        ("wmt14-xu2019", "test_bleu_compound"),  # "the same compound splitting following previous"
    ],
)
def test_records_are_of_the_score_that_the_paper_reports(preset: str, metric: str) -> None:
    records = paper_records(recipe("translation", preset))
    assert {record["metric"] for record in records} == {metric}


def test_a_study_that_no_paper_prints_has_no_records() -> None:
    config = study_config("lm", "penalties", "demo")
    assert paper_records(config) == []
    assert reduced_note(config) is None
    # The numbers of a recipe come with its note.
    assert "The text is an embedded one" in str(reduced_note(study_config("lm", "alphas", "full")))


def test_measures() -> None:
    assert {task: measure_of(task) for task in TASKS} == {
        "lm": "test_perplexity",
        "translation": "test_bleu",
        "ner": "test_f1",
        "parse": "test_uas",
        "classify": "test_accuracy",
        "image": "test_accuracy",
        "lm-char": "test_bits_per_character",
        "sequences": "test_accuracy",
    }


@pytest.mark.parametrize(("task", "preset"), ALL)
def test_catalog_says_what_a_preset_needs(task: str, preset: str) -> None:
    info = named_recipe(task, preset).about
    config = recipe(task, preset)
    assert info.summary
    assert len(info.summary) < 60
    assert ("GPU" in info.cost) == ("estimate" in info.cost and "core" not in info.cost)
    if config.task == "translation":
        assert (info.data == EMBEDDED) == (config.data.path is None)
        assert bool(info.source) == (preset not in ("smoke", "demo") and info.stands_for is None)
    if info.data != EMBEDDED:
        assert "--data" in info.data
        assert config.data.path is None or "FOLDER" in info.data or config.data.path in info.data


def test_what_xu_et_al_compare_a_row_with() -> None:
    """ "a variant of LayerNorm-simple", and the column against no norm in Table 2."""
    for task, preset in (("classify", "rt-xu2019"), ("image", "mnist-xu2019")):
        against = {row["norm"]: row["against"] for row in paper_records(recipe(task, preset))}
        assert against.pop("detach-both") == ["none", "ln-simple"]
        assert against.pop("detach-mean") == against.pop("detach-std") == ["ln-simple"]
        assert against == {key: ["ln"] for key in ("none", "ln", "ln-simple", "adanorm")}
