"""Any damage of work.json causes a one-line error that names the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import powernorm_lab as lab
from own_training import tiny_grid
from powernorm.errors import InputError
from powernorm_lab.comparing import notes_of
from powernorm_lab.engine.folders import read_json
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.engine.trials import TrialRules
from powernorm_lab.tasks.builtin import grid_of
from powernorm_lab.working import read_work

VALUES = (None, -1, "text", [[]], {"text": {}})


def damaged(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value, each with one part missing or changed."""
    yield from (other for other in VALUES if other != value)
    if isinstance(value, dict):
        for key in value:
            yield {name: one for name, one in value.items() if name != key}
            yield from ({**value, key: other} for other in damaged(value[key]))
    elif isinstance(value, list):
        for index in range(len(value)):
            for other in damaged(value[index]):
                yield [*value[:index], other, *value[index + 1 :]]


def is_one_line(folder: Path) -> bool:
    """Return whether the folder is refused in one line; undamaged values are read."""
    try:
        read_work(folder)
    except InputError as error:
        return "\n" not in str(error)
    return False


@pytest.fixture
def own(tmp_path: Path) -> Path:
    compare_grid(tiny_grid(seeds=[0, 1]), tmp_path, plan_only=True)
    rules = TrialRules({"metric": "loss", "direction": "min"}, {"ln": {3: 0.5}})
    grid = replace(tiny_grid(), race=lab.Race(), trial=rules)
    record = {**grid.work_record(), "path": []}
    (tmp_path / "work.json").write_text(json.dumps(record))
    return tmp_path


@pytest.mark.parametrize("kind", ["own", pytest.param("built in", marks=pytest.mark.slow)])
def test_any_part_of_it(kind: str, own: Path, tmp_path: Path) -> None:
    path = own / "work.json"
    record = read_json(path)
    if kind == "built in":
        config = lab.recipe("lm", "smoke")
        compare_grid(grid_of(config, notes_of(config)), tmp_path / "lm", plan_only=True)
        path = tmp_path / "lm" / "work.json"
        record = read_json(path)
    assert not is_one_line(path.parent)
    refused = 0
    for other in damaged(record):
        path.write_text(json.dumps(other))
        refused += is_one_line(path.parent)
    assert refused > 50
    for text in ("", "{", "\x00", "nonsense", json.dumps(record)[:-9]):
        path.write_text(text)
        with pytest.raises(InputError, match=re.escape(str(path))):
            read_work(path.parent)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"own": None}, "neither a built-in task nor a function"),
        ({"format": 7}, "format is 7, this version reads 1"),
        ({"race": {"confidence": 3}}, "race: a race with confidence 3"),
        ({"log_to": ["paper"]}, "there is no tracker 'paper'"),
        ({"trial": {"goal": {}}}, "trial.goal.metric is missing"),
    ],
)
def test_the_message_names_the_file_the_place_and_the_mend(
    own: Path, change: dict[str, Any], words: str
) -> None:
    path = own / "work.json"
    path.write_text(json.dumps({**read_json(path), **change}))
    with pytest.raises(InputError) as caught:
        read_work(own)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert words in said
    assert said.endswith("write it again by `powernorm compare … --plan --resume`")
