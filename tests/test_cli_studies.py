"""`powernorm compare lm --study` as a user starts it."""

import json
import re
from pathlib import Path

import pytest

from commands import SMALL, powernorm

SHORT = (
    *("--set", "training.max_steps=4"),
    *("--set", "training.validate_every=2"),
    *("--set", "training.monitor_every=0"),
)
"""For tests of the command, not of what comes of a study."""


def test_study_ends_in_its_figure(tmp_path: Path, text_file: Path) -> None:
    options = ("compare", "lm", "--study", "lowest-layers", "--preset", "smoke", *SMALL, *SHORT)
    outcome = powernorm(tmp_path, *options, "--data", text_file)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "runs" / "lm-lowest-layers-smoke"
    assert outcome.out.endswith("report: runs/lm-lowest-layers-smoke/report.html\n")
    for label in ("ln", "bn-1of2", "bn-2of2"):
        assert label in outcome.out
        assert f"{label} seed 0" in outcome.err
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["study"]["source"] == "Wang et al. 2022, Figure 3"
    assert [(run["label"], run["x"]) for run in results["runs"]] == [
        ("ln", 0.0),
        ("bn-1of2", 1.0),
        ("bn-2of2", 2.0),
    ]
    page = folder / "report.html"
    assert b'<section id="study">' in page.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--study", "alpha"], "no study 'alpha': choose one of micro-batches, lowest-layers"),
        (["--study", "alphas", "--preset", "big"], "no preset 'big'"),
        (["--study", "alphas", "--norms", "bn"], "no variant of bn; choose from ln, pn"),
        (["--study", "alphas", "--set", "norm_options.pn.momentum=0.3"], "has no effect"),
        (["--study", "lowest-layers", "--set", "model.num_layers=0"], "model.num_layers=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(tmp_path: Path, options: list[str], message: str) -> None:
    refusal = powernorm(tmp_path, "compare", "lm", *options).refused()
    assert re.search(message, refusal), refusal
    assert not (tmp_path / "runs").exists()


def test_help_lists_the_studies(tmp_path: Path) -> None:
    text = powernorm(tmp_path, "compare", "--help").out
    for name in ("micro-batches", "lowest-layers", "penalties", "alphas", "scales"):
        assert name in text
    assert "layernorm-parts" in " ".join(text.split())
