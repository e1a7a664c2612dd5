from dataclasses import asdict
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from powernorm.errors import InputError
from powernorm_lab.recipes import named_recipe, paper_records, paths_of, recipe, reduced_note
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.comparison import options_of, to_json
from powernorm_lab.settings.variants import lines_of
from powernorm_lab.tasks.builtin import check_norms
from powernorm_lab.tasks.registry import settings_from

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
