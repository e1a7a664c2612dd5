import math
from dataclasses import asdict
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from powernorm.errors import InputError
from powernorm.norms import NORMS
from powernorm_lab.recipes import named_recipe, paper_records, paths_of, recipe, reduced_note
from powernorm_lab.settings.comparison import options_of, to_json
from powernorm_lab.settings.variants import lines_of
from powernorm_lab.tasks import TASKS
from powernorm_lab.tasks.builtin import check_norms
from powernorm_lab.tasks.settings import settings_from

ALL = [
    (task, preset)
    for task, presets in ((task, paths_of(task)) for task in TASKS)
    for preset in presets
]


@pytest.mark.parametrize(("task", "preset"), ALL)
def test_recipes_say_what_they_are_and_can_be_built(task: str, preset: str) -> None:
    config = recipe(task, preset)
    assert (config.task, config.preset) == (task, preset)
    check_norms(config)
    assert settings_from(to_json(config)) == config


def line_of(values: Any) -> str:
    """Format a section of settings, a record or a row of the catalog as a line."""
    if not isinstance(values, dict):
        return f"{values}"
    return ", ".join(f"{key}={value}" for key, value in values.items())


@pytest.mark.parametrize("task", TASKS)
def test_what_every_recipe_sets_and_is_held_against(task: str, snapshot: SnapshotAssertion) -> None:
    """The snapshot has settings, options of norms, lines, published results and their notes."""
    found = {}
    for preset in paths_of(task):
        config, named = recipe(task, preset), named_recipe(task, preset)
        norms = ("bn", "rbn", "pn", "pn-only", "brn", "mabn")
        found[preset] = [
            line_of(asdict(named.about)),
            *(f"{name}: {line_of(value)}" for name, value in to_json(config).items()),
            *(f"{norm}: {line_of(options_of(config, norm))}" for norm in norms),
            line_of([line.name for line in lines_of(config)]),
            *map(line_of, paper_records(config)),
            line_of(reduced_note(config)),
        ]
    assert found == snapshot


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InputError, match="no task 'mt': choose one of lm"):
        recipe("mt", "demo")
    with pytest.raises(InputError, match="no preset 'big': choose one of smoke, demo, full"):
        recipe("lm", "big")


@pytest.mark.parametrize("preset", paths_of("lm"))
def test_own_warmups_of_norms_end_within_the_run(preset: str) -> None:
    config = recipe("lm", preset)
    for norm in ("pn", "pn-only", "pn-static", "brn", "mabn"):
        warmup = options_of(config, norm)["warmup_steps"]
        assert isinstance(warmup, int)
        assert 0 < warmup < 0.6 * config.training.max_steps


def test_paper_results_are_known_norms_with_their_sources() -> None:
    printed = [
        *named_recipe("lm", "full").results,
        *named_recipe("lm", "wikitext103-shen2020").results,
        *named_recipe("lm", "wikitext103-wang2022-pre").results,
    ]
    assert {row.norm for row in printed} <= set(NORMS)
    assert len(printed) == len(set(printed)) == 2 * (4 + 3 + 3 + 4 + 4)
    by_key = {(r.source, r.placement, r.norm, r.dataset): r.value for r in printed}
    assert by_key["Shen et al. 2020, Table 2", "pre", "pn", "Penn Treebank"] == 47.6
    assert by_key["Wang et al. 2022, Table 2", "pre", "rbn", "Penn Treebank"] == 43.2
    assert by_key["Wang et al. 2022, Table 2", "post", "bn", "WikiText-103"] == 17.2
    assert by_key["Wang et al. 2022, Table 3", "pre", "mabn", "WikiText-103"] == math.inf
