"""`powernorm compare verdict` as a subprocess, as a user starts it."""

import json
from pathlib import Path

import pytest

from commands import SMALL, powernorm


@pytest.mark.slow
def test_the_study_is_trained_measured_and_reported(tmp_path: Path) -> None:
    small = (*SMALL, "--set", "training.max_steps=10", "--set", "model.num_layers=1")
    whole = ("compare", "verdict", "--preset", "smoke", "--out", "runs", *small)
    done = powernorm(tmp_path, *whole)
    assert done.code == 0, done.err
    assert "[4/4] tag-turkish-post-64x6-8rows: ln, bn, seed 0" in done.err
    assert done.out.startswith("4 settings, preset smoke.")
    assert "report: runs/report.html" in done.out
    results = json.loads((tmp_path / "runs" / "verdict.json").read_text())
    assert [setting["task"] for setting in results["settings"]] == ["lm", "lm", "tag", "tag"]

    again = powernorm(tmp_path, *whole, "--resume")
    assert again.code == 0, again.err
    assert "bn seed 0" not in again.err
    (tmp_path / "runs" / "report.html").unlink()
    assert powernorm(tmp_path, "report", "runs").code == 0
    assert "Does the verdict hold?" in (tmp_path / "runs" / "report.html").read_text()


def test_options_that_the_study_chooses_itself_are_refused(tmp_path: Path) -> None:
    line = powernorm(tmp_path, "compare", "verdict", "--norms", "ln", "--data", "rt").refused()
    assert "leave out --norms, --data" in line
    assert (
        "no preset 'big'" in powernorm(tmp_path, "compare", "verdict", "--preset", "big").refused()
    )


def test_an_embedded_text_is_data(tmp_path: Path) -> None:
    small = (*SMALL, "--set", "training.max_steps=5")
    done = powernorm(
        tmp_path, "compare", "lm", "--preset", "smoke", "--data", "rt", "--out", "r", *small
    )
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "r" / "results.json").read_text())
    assert results["data"]["name"] == "rt"
