"""`powernorm recipes` as a subprocess, as a user starts it."""

import re
from pathlib import Path

import pytest

from commands import powernorm
from powernorm.recipes import RECIPES
from powernorm.recipes.studies import STUDIES


def test_all_recipes_are_listed_and_fit_a_terminal(tmp_path: Path) -> None:
    outcome = powernorm(tmp_path, "recipes", fresh=True)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    first_words = [line.split()[0] for line in lines if line.strip()]
    for presets in RECIPES.values():
        assert set(presets) <= set(first_words)
    assert set(STUDIES) <= set(first_words)
    # Every number of files is explained, and every explanation has its row.
    used = {found[1] for line in lines if (found := re.search(r"(?<=.)\bfiles (\d+)\b", line))}
    explained = {found[1] for line in lines if (found := re.match(r"files (\d+): ", line))}
    assert used == explained == {str(number + 1) for number in range(len(explained))}
    assert "prepare-iwslt14.sh" in outcome.out


@pytest.mark.parametrize("task", ["lm", "translation"])
def test_recipes_of_one_task(tmp_path: Path, task: str) -> None:
    outcome = powernorm(tmp_path, "recipes", task)
    assert outcome.code == 0
    for other, presets in RECIPES.items():
        assert (f"powernorm compare {other} --preset" in outcome.out) == (other == task)
        if other == task:
            assert all(preset in outcome.out for preset in presets)


def test_unknown_task(tmp_path: Path) -> None:
    line = powernorm(tmp_path, "recipes", "mt").refused()
    assert "'mt'" in line
    assert "choose one of lm, mlm, tag, translation" in line


def test_unknown_preset_lists_the_known_ones(tmp_path: Path) -> None:
    line = powernorm(tmp_path, "compare", "translation", "--preset", "full").refused()
    assert "no preset 'full': choose one of smoke, demo, verses-small" in line


def test_placement_of_another_preset_is_refused(tmp_path: Path) -> None:
    arguments = ("compare", "translation", "--preset", "iwslt14-wang2022-pre", "--placement")
    line = powernorm(tmp_path, *arguments, "post").refused()
    assert "use --preset iwslt14-wang2022-post" in line
    assert not list(tmp_path.iterdir())


def test_files_of_ones_own_are_asked_for(tmp_path: Path) -> None:
    line = powernorm(tmp_path, "compare", "translation", "--preset", "iwslt15-xu2019").refused()
    assert "iwslt15_en_vi does not exist" in line
    assert "--data FOLDER" in line
