"""Study of the verdict: stored scores are reproduced, and a small study completes."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import powernorm

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "verdict"
SECONDS = 240


def python(tmp_path: Path, *parts: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, parts)],
        capture_output=True,
        text=True,
        env=os.environ | {"POWERNORM_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script as a module."""
    return module(monkeypatch, "scores")


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    monkeypatch.syspath_prepend(STUDY)
    monkeypatch.setitem(sys.modules, name, None)  # is taken away again at the end
    del sys.modules[name]
    return importlib.import_module(name)


def near(found: Any) -> Any:
    """Compare numbers in nested lists and dictionaries approximately."""
    if isinstance(found, dict):
        return {key: near(value) for key, value in found.items()}
    if isinstance(found, list):
        return [near(value) for value in found]
    return pytest.approx(found, abs=1e-12) if isinstance(found, float) else found


@pytest.mark.slow
def test_stored_scores_and_tables_are_those_of_the_stored_settings(tmp_path: Path) -> None:
    python(tmp_path, STUDY / "run.py", "--scores-of", STUDY / "verdict.json", "--out", tmp_path)
    stored = json.loads((STUDY / "verdict.json").read_text(encoding="utf-8"))
    assert json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8")) == near(stored)
    made = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "tables").iterdir()}
    assert made.keys() == {f"{name}.csv" for name in ("bn", "rbn", "pn", "advice", "settings")}
    for name, text in made.items():
        assert text == (STUDY / "tables" / name).read_text(encoding="utf-8"), name
    assert "<svg" in (tmp_path / "scatter.svg").read_text(encoding="utf-8")


def test_stored_settings_are_those_that_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads((STUDY / "verdict.json").read_text(encoding="utf-8"))
    configs = module(monkeypatch, "settings").settings()
    assert [setting["name"] for setting in stored["settings"]] == list(configs)
    for setting, config in zip(stored["settings"], configs.values(), strict=True):
        names = {item.name for item in fields(config)} & setting.keys()
        assert len(names) == 7
        for name in (*names, "name", "early_step"):
            assert getattr(config, name) == setting[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tag-turkish-pre-64x2-4rows", "lm-verses-post-64x2-4rows"])
def test_a_setting_is_trained_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out = tmp_path / "out"
    short = ("max_steps=10", "num_features=8", "num_layers=1")
    sets = [part for setting in short for part in ("--set", setting)]
    python(tmp_path, STUDY / "run.py", "--only", name, "--out", out, *sets)
    results = json.loads((out / "verdict.json").read_text(encoding="utf-8"))
    stored = json.loads((STUDY / "verdict.json").read_text(encoding="utf-8"))
    assert results.keys() == stored.keys()
    (setting,) = results["settings"]
    (like,) = (setting for setting in stored["settings"] if setting["name"] == name)
    assert setting.keys() == like.keys()
    assert setting["early"].keys() == like["early"].keys()
    assert (setting["group"], setting["early_step"]) == (like["group"], 1)
    assert None not in setting["early"].values()
    runs = json.loads((out / name / "results.json").read_text(encoding="utf-8"))["runs"]
    losses = {(run["norm"], run["seed"]): run["metrics"]["test_loss"] for run in runs}
    assert setting["gaps"]["bn"]["test"] == pytest.approx(
        [losses["bn", seed] - losses["ln", seed] for seed in (0, 1)]
    )
    config = module(monkeypatch, "settings").settings()[name]
    small = replace(config, max_steps=10, num_features=8, num_layers=1)
    training = module(monkeypatch, "training")
    (run,) = (run["folder"] for run in runs if (run["norm"], run["seed"]) == ("ln", 0))
    model = training.early_model(small, out / name / run)
    data = training.data_of(small, out / name / run, results["num_batches"])
    last = powernorm.diagnose(model, [one.inputs for one in data.training], batch_sizes=()).rows[-1]
    assert setting["early"]["ln_total_tid_last"] == pytest.approx(last.total_tid)
    settings_table = (out / "tables" / "settings.csv").read_text(encoding="utf-8")
    assert f"\n{name}," in settings_table


def test_best_threshold_is_the_middle_of_the_best(scores: ModuleType) -> None:
    def best(values: list[float], worse: list[bool]) -> float:
        return float(scores.best_threshold(np.array(values), np.array(worse)))

    assert best([1, 2, 3, 4], [False, False, True, True]) == 2.5
    # -∞, 2.5 and 4.5 have three right signs each.
    assert best([1, 2, 3, 4, 5], [True, False, True, False, True]) == 2.5
    assert best([1, 3], [True, True]) == -np.inf
    assert best([1, 3], [False, False]) == np.inf


def test_a_norm_that_was_lost_counts_as_worse(scores: ModuleType) -> None:
    def gap(num_lost: int, num_base_lost: int, *test: float) -> float:
        record = {"test": test, "num_lost": num_lost, "num_base_lost": num_base_lost}
        return float(scores.mean_gap({"gaps": {"bn": record}}, "bn"))

    assert gap(1, 0, -0.5) == np.inf
    assert gap(0, 1, 0.5) == -np.inf
    assert gap(1, 1, -0.5, 0.1) == pytest.approx(-0.2)
    assert np.isnan(scores.mean_gap({"gaps": {}}, "bn"))
