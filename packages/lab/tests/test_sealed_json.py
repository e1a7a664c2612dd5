"""Edited JSON files of runs and comparisons are used only with `--accept-edits`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from commands import powernorm, refusal
from powernorm.errors import InputError
from powernorm.json_reading import SEAL, read_json_object, seal_json
from powernorm_lab.engine.grid import Race
from powernorm_lab.schema import record_of

MODULE = """
def train(run, *, steps: int = 2):
    run.build_norm(4)
    return {"accuracy": 0.5}
"""
COMPARE = ("compare", "mine:train", "--goal", "accuracy:max", "--out", "runs", "--norms", "ln,bn")
RESUME, WORK, RUN = (*COMPARE, "--resume"), ("work", "runs"), "runs/ln-seed0"
READERS = {
    f"{RUN}/config.json": (RESUME, ("diagnose", RUN)),
    f"{RUN}/result.json": (RESUME, WORK, ("report", RUN)),
    "runs/comparison.json": (WORK,),
    "runs/results.json": (("report", "runs"), ("report", RUN), ("results", "runs")),
    "runs/work.json": (WORK,),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "mine.py").write_text(MODULE)
    assert powernorm(folder, *COMPARE, "--plan").code == 0
    done = powernorm(folder, *RESUME)
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def home(compared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compared, tmp_path / "home")


def edit(path: Path, more: str = '"note": 1') -> None:
    path.write_text(path.read_text().replace("{", f"{{{more},", 1))


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_digit_is_named(home: Path, name: str) -> None:
    path = home / name
    path.write_text(re.sub(r": \d", ": 7", path.read_text(), count=1))
    for command in READERS[name]:
        done = powernorm(home, *command)
        assert done.code == 2
        assert f"{name} was edited or damaged" in done.err


def test_edits_are_accepted_once_and_named(home: Path) -> None:
    for name in READERS:
        edit(home / name)
    accept = ("report", "runs", "--accept-edits")
    told = [f"accepted the edit of {name}" for name in READERS]
    assert sorted(powernorm(home, *accept).err.splitlines()) == sorted(told)
    assert not powernorm(home, *accept).err


def test_every_command_with_the_option(home: Path) -> None:
    for command in (RESUME, WORK, ("report", RUN), ("results", "runs")):
        for name in (f"{RUN}/result.json", "runs/results.json"):
            edit(home / name, f'"{command[0]}": 1')
        done = powernorm(home, *command, "--accept-edits")
        assert (done.code, done.err.count("accepted the edit of ")) == (0, 2), done.err
    assert "give --resume, too" in refusal(home, *COMPARE, "--accept-edits")
    for more in ('"note": 1e999', '"note": "\\ud800"', ""):
        edit(home / RUN / "config.json", more)
        assert "config.json" in refusal(home, "report", "runs", "--accept-edits")


def test_without_a_seal_and_in_another_order(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sealed = seal_json({"b": {"y": 0.1, "x": (1,)}, "a": {10: "ö", 9: None}})
    assert seal_json({SEAL: "old", "a": sealed["a"], "b": sealed["b"]})[SEAL] == sealed[SEAL]
    read = {"b": {"y": 0.1, "x": [1]}, "a": {"9": None, "10": "ö"}}
    for written in (read, sealed):
        path.write_text(json.dumps(written))
        assert read_json_object(path, "") == read


def test_a_number_that_no_file_of_ours_has_is_refused() -> None:
    race = {"confidence": float("inf"), "margin": None}
    with pytest.raises(InputError, match=r"work.json: a number is infinite or NaN; write it again"):
        record_of(Race, race, "work.json", "write it again", exact=True)
