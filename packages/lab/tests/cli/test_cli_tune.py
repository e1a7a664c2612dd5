"""`powernorm tune` as users call it."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from pathlib import Path

import pytest
from lab.tests.stopped_commands import stopped

from commands import powernorm, refusal, start
from powernorm.integrations.extras import install_command

MODULE = """
import math
import time


def train(run, *, learning_rate: float = 1e-4, seconds: float = 0.0, steps: int = 3):
    run.build_norm(4)
    run.track()
    loss = 1 + abs(math.log10(learning_rate) + 2)
    for step, _ in run.steps([None], shard=False):
        run.log(step, train_loss=loss, valid_loss=loss + 1 / step)
        time.sleep(seconds)
    return {"valid_loss": loss, "test_loss": loss}
"""
COMMAND = ("tune", "mine:train", "--goal", "test_loss:min", "--norms", "ln,bn", "--device", "cpu")
SEARCH = ("--search", "learning_rate=log:1e-5:1", "--out", "runs")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "mine.py").write_text(MODULE)
    return folder


def statuses(folder: Path) -> list[str]:
    with (folder / "trials.csv").open() as file:
        return [row["status"] for row in csv.DictReader(file)]


def test_a_tuning_from_the_command_line(home: Path) -> None:
    done = powernorm(home, *COMMAND, *SEARCH, "--trials", "2", "--seeds", "2", "--json", fresh=True)
    assert done.code == 0, done.err
    results = json.loads(done.out)
    assert results["tuning"]["num_trials"] == 2
    assert [(run["norm"], run["seed"]) for run in results["runs"]] == [
        *(("ln", 0), ("ln", 1)),
        *(("bn", 0), ("bn", 1)),
    ]
    assert "2 of 2 trials of each norm are done; best valid loss: ln " in done.err
    (home / "runs" / "report.html").unlink()
    assert powernorm(home, "report", "runs").code == 0
    assert "How the settings were chosen" in (home / "runs" / "report.html").read_text()
    page = powernorm(home, "results", "runs").out
    assert "Every norm had 2 trials (" in page
    assert "log:1e-5:1" in page
    assert "has a tuning: give another --out" in refusal(home, *COMMAND, *SEARCH)


@pytest.mark.slow
def test_a_trial_can_be_trained_by_several_processes(home: Path) -> None:
    out = ("--search", "learning_rate=log:1e-5:1", "--out", "runs-together")
    done = powernorm(home, *COMMAND, *out, "--trials", "1", "--devices", "2")
    assert done.code == 0, done.err
    assert statuses(home / "runs-together") == ["finished"] * 2
    for run in json.loads((home / "runs-together" / "results.json").read_text())["runs"]:
        assert run["ran_on"]["processes"] == 2


@pytest.mark.slow
def test_interrupted_it_says_how_to_go_on_and_does(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "mine.py", tmp_path)
    command = (*COMMAND, *SEARCH, "--trials", "2", "--set", "seconds=0.5")
    process = start(tmp_path, *command)
    log = tmp_path / "runs/trials/bn-trial0-seed1000/metrics.csv"
    err = stopped(process, signal.SIGINT, log.exists)
    assert err.splitlines()[-1].endswith(
        "resume with: powernorm " + " ".join(command) + " --resume"
    )
    assert "a tuning with unfinished trials" in refusal(tmp_path, "report", "runs")
    done = powernorm(tmp_path, *command, "--resume")
    assert done.code == 0, done.err
    assert statuses(tmp_path / "runs") == ["finished"] * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("--trials", "0"), "trials is 0: give at least 1 for every norm"),
        (("--search", "learning_rate=1e-4:1"), "is not a range: give log:LOW:HIGH"),
        (("--select-by", "valid_loss"), "give METRIC:max or METRIC:min"),
        (("--preset", "demo"), "--preset cannot be used with the function mine:train"),
    ],
)
def test_what_cannot_be_used_is_one_line(home: Path, changes: tuple[str, str], words: str) -> None:
    message = refusal(home, *COMMAND, *SEARCH[:2], "--out", "new", *changes)
    assert words in message
    assert not (home / "new").exists()


def test_of_a_built_in_task(tmp_path: Path) -> None:
    lm = ("tune", "lm", "--preset", "smoke", "--out", "new")
    assert "--goal cannot be used with the built-in task lm" in refusal(
        tmp_path, *lm, "--goal", "a:max"
    )
    judged = refusal(tmp_path, *lm, "--select-by", "valid_bleu:max")
    assert "lm does not measure valid_bleu:max during the training: choose valid_loss" in judged
    varied = refusal(tmp_path, "tune", "classify", "--preset", "rt-xu2019", "--out", "new")
    assert "write `variants = []` into a recipe of your own" in varied
    shared = refusal(tmp_path, *lm, "--search", "training.num_threads=int:1:2")
    assert "training.num_threads, which all runs of a comparison share" in shared
    unknown = refusal(tmp_path, *lm, "--search", "learning_rate=log:1e-4:1e-2")
    assert "did you mean optimizer.learning_rate" in unknown


def test_without_optuna_the_extra_is_named(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'optuna'\", name='optuna')"
    (tmp_path / "optuna.py").write_text(missing)
    message = powernorm(tmp_path, "tune", "lm", "--preset", "smoke").refused()
    assert f"needs the package optuna: {install_command('powernorm-lab', 'tune')}" in message
