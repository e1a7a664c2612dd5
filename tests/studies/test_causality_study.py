"""The study of causality: its settings are those of the stored runs, and a small one runs."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from powernorm.lab.tasks.run_settings import comparison_settings
from powernorm.lab.tasks.settings import upgraded_run

STUDY = Path(__file__).parents[2] / "studies" / "causality"
STORED = STUDY / "results" / "results.json"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(STUDY)
    for name in ("run", "figure"):
        monkeypatch.setitem(sys.modules, name, None)  # is taken away again at the end
        del sys.modules[name]
    return importlib.import_module("run")


def test_settings_are_those_of_the_stored_runs(study: Any) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    config = study.config_of("reduced", [])
    found = json.loads(json.dumps(comparison_settings(config)))
    for other in ("versions", "machine", "date"):
        del found[other], stored["settings"][other]
    assert found == upgraded_run(stored["settings"])
    notes = study.notes_of(config)
    assert notes.reduced == stored["reduced"]
    assert sorted(map(str, notes.paper)) == sorted(map(str, stored["paper"]))


def test_full_is_the_papers_setting(study: Any) -> None:
    config = study.config_of("full", [])
    assert (config.model.num_layers, config.model.num_features) == (3, 256)
    assert (config.data.batch_size, config.training.max_steps) == (120, 20_000)


def test_small_study_trains_both_forms(tmp_path: Path, text_file: Path) -> None:
    short = ("norms=ln,bn", "training.max_steps=4", "training.validate_every=4")
    small = (f"data.path={text_file}", "data.vocabulary_size=300", "training.monitor_every=0")
    settings = [part for one in (*short, *small) for part in ("--set", one)]
    done = subprocess.run(
        [sys.executable, STUDY / "run.py", "--preset", "smoke", "--out", tmp_path / "r", *settings],
        capture_output=True,
        text=True,
        env=os.environ | {"POWERNORM_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "r" / "results.json").read_text(encoding="utf-8"))
    marks = {run["label"]: run.get("remark") for run in results["runs"]}
    seeing = "sees the future"
    assert marks == {"ln": None, "bn": None, "ln-future": seeing, "bn-future": seeing}
    assert "its perplexity is that of no language model" in results["reduced"]
    assert "<svg" in (tmp_path / "r" / "figure.svg").read_text(encoding="utf-8")
