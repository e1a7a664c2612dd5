"""`powernorm remove` as a user starts it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from lab.tests.stopped_commands import stopped

from commands import powernorm, refusal, start

MODELS = """
import torch
from torch import nn

def build(post=False):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=not post)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Linear(8, 3))
    return model, [torch.randn(4, 5, 8) for _ in range(12)]

def post():
    return build(post=True)
"""
FEW = ("--steps", "4", "--set", "method.batches=2", "--set", "training.log_every=1")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "my_models.py").write_text(MODELS)
    return tmp_path


def test_a_model_by_its_name_from_start_to_end(home: Path) -> None:
    chosen = ("remove", "my_models:build", "--out", "out", *FEW)
    more = ("--method", "freeze", "--seed", "1", "--threads", "1")
    outcome = powernorm(home, *chosen, *more, fresh=True)
    assert outcome.code == 0, outcome.err
    assert "fitting 2 norms of my_models:build on 2 batches" in outcome.err
    assert "freeze+distillation seed 1: step 4, valid_error" in outcome.err
    assert f"model without norms: {home / 'out' / 'model'}" in outcome.out
    assert (home / "out" / "report.html").is_file()
    written = json.loads((home / "out" / "removal.json").read_text())
    assert written["settings"]["method"]["name"] == "freeze"
    assert written["settings"]["seed"] == 1
    assert "has another removal" in refusal(home, *chosen)


def test_what_does_not_fit_is_one_line(home: Path) -> None:
    wanted = {
        ("my_models:post", "--method", "match-centered"): "method.name=match works for every norm",
        ("my_models:build", "--share", "0.1"): "give training.steps",
        ("my_models:build", "--data", "rt"): "leave out --data",
        ("my_models:build", "--stock"): "is not a model of transformers",
        ("nothing", "--steps", "3"): "nothing does not exist: give a run",
        ("my_models:build", "--set", "method.nam=match"): "did you mean method.name",
    }
    for given, words in wanted.items():
        assert words in refusal(home, "remove", *given, "--out", "out", "-q")
        assert not (home / "out").exists()


@pytest.mark.slow
def test_interrupted_it_says_how_to_go_on_and_does(home: Path) -> None:
    chosen = ("remove", "my_models:build", "--out", "out", *FEW[2:], "--steps", "4000")
    process = start(home, *chosen)
    log = home / "out" / "metrics.csv"
    err = stopped(
        process,
        signal.SIGTERM,
        lambda: log.exists() and len(log.read_text().splitlines()) >= 4,
    )
    assert f"resume with: powernorm {' '.join(chosen)} --resume" in err
    assert json.loads((home / "out" / "result.json").read_text())["status"] == "interrupted"
    other = powernorm(home, "remove", "my_models:build", "--out", "out", *FEW, "--resume")
    assert "settings.training.steps 4000 → 4" in other.refused()
