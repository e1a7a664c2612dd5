"""Pages of the papers: each preset, study, setting and test that they name exists."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from powernorm_lab.recipes import named_recipe
from powernorm_lab.recipes.files import paths_of
from powernorm_lab.recipes.studies import study_config
from powernorm_lab.runs import TASKS

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docs" / "papers").glob("*/*.csv"))
ROWS = [row for file in FILES for row in csv.reader(file.read_text("utf-8").splitlines())]
PAGES = sorted((ROOT / "docs" / "papers").glob("*.md"))
PAGE = "\n".join(
    [*(page.read_text(encoding="utf-8") for page in PAGES), *(" | ".join(row) for row in ROWS)]
)
# A command that is marked as pending is not there yet.
COMMANDS = sorted(
    set(re.findall(r"`compare ([a-z-]+) --(preset|study) ([\w-]+)[^`]*`(?! <!-- pending)", PAGE))
)
COLUMNS = sorted(
    {
        (task, preset)
        for row in ROWS
        for task, presets in re.findall(rf"^({'|'.join(TASKS)}) (.+)", row[1])
        for preset in re.findall(r"`([\w-]+)`", presets)
    }
)
TESTS = sorted(set(re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", PAGE)))


@pytest.mark.parametrize(("task", "kind", "name"), COMMANDS)
def test_commands_exist(task: str, kind: str, name: str) -> None:
    if kind == "preset":
        named_recipe(task, name)
    else:
        study_config(task, name, "smoke")


@pytest.mark.parametrize(("task", "preset"), COLUMNS)
def test_columns_of_the_tables_have_their_presets(task: str, preset: str) -> None:
    named_recipe(task, preset)


def test_every_recipe_of_a_paper_is_on_a_page() -> None:
    papers = re.compile(r"-(shen2020|wang2022|xu2019)(-|$)")
    names = [name for task in TASKS for name in paths_of(task) if papers.search(name)]
    assert names
    assert [name for name in names if f"`{name}`" not in PAGE and f" {name} " not in PAGE] == []


@pytest.mark.parametrize(("file", "function"), TESTS)
def test_tests_exist(file: str, function: str) -> None:
    (path,) = [*ROOT.glob(f"tests/**/{file}"), *ROOT.glob(f"packages/lab/tests/**/{file}")]
    assert not function or f"def {function}(" in path.read_text(encoding="utf-8")
