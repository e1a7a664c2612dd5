"""A run that is killed at any time and in any way has the same results after a resume."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from lab.tests.killing import CHANGED, ENGINES, SUBJECTS
from lab.tests.own_training import tiny_grid
from lab.tests.training.same_runs import assert_readable, assert_same_folder
from lab.tests.training.tiny_training import compare
from lab.tests.training.tiny_translation import short_translation

from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.engine.run_training import RunTraining


def run_script(folder: Path, subject: str, *arguments: object, seconds: int) -> str:
    """Run `killing.py`, and return the last line that it printed."""
    script = Path(__file__).parent / "killing.py"
    done = subprocess.run(
        [sys.executable, script, subject, folder, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def check(folder: Path, subject: str, kills: int) -> dict[str, int]:
    seed = random.Random(subject).randrange(1000)
    said = run_script(folder, subject, kills, seed, seconds=120 + 60 * kills)
    counts: dict[str, int] = json.loads(said)
    assert sum(number for end, number in counts.items() if end != "over") == kills
    resumed = sorted(folder.glob("killed-*"))
    assert resumed
    for out in resumed:
        if subject in ENGINES:  # which have logs of workers, too
            for run in (folder / "whole").glob("*-seed*"):
                assert_same_folder(run, out / run.name)
        else:
            assert_same_folder(folder / "whole", out)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["own", "lm"])
def test_killed_at_random_moments(tmp_path: Path, subject: str) -> None:
    check(tmp_path, subject, 3)


@pytest.mark.slow
@pytest.mark.parametrize("subject", [*SUBJECTS, *ENGINES])
def test_killed_at_many_random_moments(tmp_path: Path, subject: str) -> None:
    counts = check(tmp_path, subject, 14 if subject in ENGINES else 20)  # over 200 together
    assert "killed" in counts
    assert counts.keys() & {"stopped", "interrupted"}


@pytest.mark.slow
@pytest.mark.parametrize("moments", [4, 0])
def test_killed_before_changes_of_its_folder(tmp_path: Path, moments: int) -> None:
    """Kill before every change if `moments` is 0, else before that many of them."""
    total = int(run_script(tmp_path, CHANGED, moments, seconds=120 if moments else 1200))
    config = short_translation(tmp_path / "pairs")
    folders = sorted(tmp_path.glob("killed-*"))
    assert len(folders) == (moments or total)
    for out in folders:
        assert_readable(out)
        compare(config, out, resume=True)
        assert_same_folder(tmp_path / "whole", out)


def test_killed_between_the_end_and_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint then has the averaged weights, from which no run can resume."""
    grid = tiny_grid(norms=["bn"])
    compare_grid(grid, tmp_path / "whole")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunTraining, "_keep", killed)
        with pytest.raises(KeyboardInterrupt):
            compare_grid(grid, tmp_path / "killed")
        assert not list((tmp_path / "killed").glob("*/result.json"))
    monkeypatch.setattr(type(grid.task), "start", killed)  # it must not be trained again
    compare_grid(grid, tmp_path / "killed", resume=True)
    assert_same_folder(tmp_path / "whole", tmp_path / "killed")
