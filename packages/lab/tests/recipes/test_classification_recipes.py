"""Presets of classification have the settings and results of the papers."""

from dataclasses import replace
from pathlib import Path

import pytest
from lab.tests.training.tiny_training import compare

from powernorm.errors import InputError
from powernorm_lab.recipes import named_recipe, paths_of, recipe
from powernorm_lab.recipes.checks import check_choice
from powernorm_lab.recipes.differences import changes_of, reduced_note
from powernorm_lab.settings.comparison import ComparisonSettings, options_of
from powernorm_lab.settings.variants import lines_of
from powernorm_lab.tasks.classify.sources import load_texts
from powernorm_lab.tasks.registry import task_of

TASK = "classify"
SETS = ("imdb", "sogou", "dbpedia", "yelp")
WANG = [f"{name}-wang2022-{placement}" for name in SETS for placement in ("pre", "post")]


def of(preset: str) -> ComparisonSettings:
    return recipe(TASK, preset)


def values(preset: str, placement: str = "pre") -> dict[str, float | None]:
    rows = [row for row in named_recipe(TASK, preset).results if row.placement == placement]
    assert len({row.norm for row in rows}) == len(rows)
    assert {row.metric for row in rows} == {"test_accuracy"}
    return {row.norm: row.value for row in rows}


@pytest.mark.parametrize("preset", paths_of(TASK))
def test_the_task_obeys_every_setting(preset: str) -> None:
    config = of(preset)
    for line in lines_of(config):
        task_of(config).check(line.settings, line.norm)
    for norm in ("pn", "pn-only", "brn", "mabn"):
        warmup = options_of(config, norm).get("warmup_steps", 0)
        assert isinstance(warmup, int)
        assert warmup <= config.training.max_steps / 2


def test_tables_1_to_4_of_xu2019() -> None:
    assert values("rt-xu2019") == {
        "none": 76.85,
        "ln": 77.21,
        "ln-simple": 76.66,
        "detach-both": 76.40,
        "detach-mean": 75.02,
        "detach-std": 77.04,
        "adanorm": 77.50,
    }
    assert values("sst5-xu2019") == {
        "none": 38.55,
        "ln": 39.23,
        "ln-simple": 40.54,
        "detach-both": 40.04,
        "detach-mean": 40.99,
        "detach-std": 41.74,
        "adanorm": 40.54,
    }


def test_tables_2_and_3_of_wang2022() -> None:
    table = {
        placement: {name: values(f"{name}-wang2022-{placement}", placement) for name in SETS}
        for placement in ("pre", "post")
    }
    rows = {
        ("post", "ln"): (84.1, 94.6, 97.5, 93.3),
        ("post", "bn"): (84.0, 94.3, 97.5, 93.3),
        ("post", "rbn"): (84.5, 94.7, 97.6, 93.6),
        ("post", "pn-only"): (84.2, 90.6, 97.1, 89.6),
        ("post", "pn"): (84.0, 94.6, 97.4, 93.2),
        ("post", "brn"): (83.6, 94.5, 97.5, 93.3),
        ("post", "mabn"): (84.1, 94.5, 97.5, 93.5),
        ("pre", "ln"): (84.1, 94.5, 97.5, 93.3),
        ("pre", "bn"): (84.0, 94.3, 97.5, 93.3),
        ("pre", "rbn"): (84.4, 94.7, 97.5, 93.5),
        ("pre", "pn-only"): (84.2, 94.4, 97.4, 93.3),
        ("pre", "pn"): (83.3, 94.4, 97.3, 93.4),
        ("pre", "brn"): (84.3, 94.5, 97.4, 93.4),
        ("pre", "mabn"): (84.4, 94.6, 97.5, 93.3),
    }
    for (placement, norm), expected in rows.items():
        assert tuple(table[placement][name][norm] for name in SETS) == expected
    assert sum(len(by_norm) for part in table.values() for by_norm in part.values()) == 4 * 14


def test_what_is_not_the_papers_is_said() -> None:
    rt = reduced_note(of("rt-xu2019"))
    assert rt is not None
    assert "four fifths" in rt
    imdb = reduced_note(of("imdb-wang2022-pre"))
    assert imdb is not None
    assert "training half" in imdb
    changed = of("rt-xu2019")
    changed = replace(changed, training=replace(changed.training, max_steps=50))
    changes = changes_of(changed)
    assert changes is not None
    assert changes["settings"]["training.max_steps"]["here"] == 50
    assert reduced_note(of("demo")) is None


def test_files_of_ones_own_are_asked_for_and_placements_have_twins() -> None:
    for preset in ("smoke", "demo", "rt-xu2019", "imdb-wang2022-pre"):
        check_choice(of(preset))
    with pytest.raises(InputError, match=r"trees does not exist.*train\.txt, dev\.txt"):
        check_choice(of("sst5-xu2019"))
    with pytest.raises(InputError, match=r"sogou_news_csv does not exist.*train\.csv"):
        check_choice(of("sogou-wang2022-post"))
    moved = of("imdb-wang2022-pre")
    moved = replace(moved, model=replace(moved.model, placement="post"))
    with pytest.raises(InputError, match="use --preset imdb-wang2022-post"):
        check_choice(moved)


def test_epochs_are_those_of_the_embedded_set() -> None:
    config = of("rt-xu2019")
    task = task_of(config)
    encoded = task.encode(config)
    epoch = task.data(encoded, config, 0).batches.batches_per_epoch
    assert config.training.validate_every == epoch
    assert config.training.max_steps % epoch == 0
    assert load_texts(config.data.path).name == "rt"


@pytest.mark.slow
def test_every_norm_of_the_demo_knows_more_than_chance(tmp_path: Path) -> None:
    results = compare(of("demo"), tmp_path)
    for run in results.runs:
        assert run.status == "finished"
        accuracy = run.metrics["test_accuracy"]
        assert accuracy is not None
        assert accuracy > 68, run.norm
