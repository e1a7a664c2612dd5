"""Files of earlier releases load and compute the same results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import releases
import torch
from releases import EXPECTED, MODELS, RELEASES, own_function
from safetensors.torch import load_file

import powernorm
import powernorm_lab as lab
from covering import some_default
from powernorm.checksums import seal_of
from powernorm_lab.runs import RESULT_FILE
from powernorm_lab.settings.comparison import Notes

VERSIONS = sorted(path.name for path in RELEASES.iterdir())
SAVED = [(version, name) for version in VERSIONS for name in MODELS]


def test_this_release_or_the_last_is_kept() -> None:
    assert "0.2.0" in VERSIONS


@pytest.mark.parametrize(("version", "name"), SAVED)
def test_a_saved_model_computes_what_it_did(version: str, name: str) -> None:
    folder = RELEASES / version / "models" / name
    build, _, _ = MODELS[name]
    is_pretrained = name.startswith("bert")
    if is_pretrained:
        pytest.importorskip("transformers")
    expected = load_file(RELEASES / version / EXPECTED.format(name))
    for model in (None, build()) if is_pretrained else (build(),):
        loaded = powernorm.load(folder, model)
        torch.testing.assert_close(
            releases.output(loaded, expected["x"]), expected["y"], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("version", VERSIONS)
def test_runs_are_read_and_their_models_loaded(version: str) -> None:
    runs = RELEASES / version / "runs"
    for name in ("lm", "own"):
        comparison = lab.read_comparison(runs / name)
        assert {run.norm for run in comparison.runs} == {"rbn", "pn"}
        for run in comparison.runs:
            stored = json.loads((runs / name / run.folder / RESULT_FILE).read_text())
            assert (run.status, run.metrics) == (stored["status"], stored["metrics"])
    trained = lab.load_trained(runs / "lm" / "pn-pre-seed0")
    assert trained.step == 4
    assert set(lab.saved_states(runs / "own" / "rbn-seed0")) == {"model", "optimizer"}


@pytest.mark.parametrize("version", VERSIONS)
def test_all_sums_are_right(version: str) -> None:
    kinds = {".ckpt", ".pt", ".safetensors"}
    sealed = [
        file
        for folder in ("models", "runs")
        for file in (RELEASES / version / folder).rglob("*")
        if file.suffix in kinds
    ]
    assert len(sealed) > len(MODELS)
    assert [file for file in sealed if seal_of(file) != "whole"] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", some_default(["lm", "own"], "own"))
def test_a_finished_comparison_is_continued(version: str, name: str, tmp_path: Path) -> None:
    """With one more seed, existing runs are kept and new ones trained."""
    folder = tmp_path / name
    shutil.copytree(RELEASES / version / "runs" / name, folder)
    before = {run.folder: run.metrics for run in lab.read_comparison(folder).runs}
    resume: dict[str, Any] = {"resume": True, "quiet": True}
    if name == "own":
        after = lab.compare(
            own_function, folder, norms=["rbn", "pn"], seeds=2, goal={"loss": "min"}, **resume
        )
    else:
        changes = [*releases.SMALL, "seeds=0,1"]
        config = lab.override(lab.recipe("lm", "smoke"), changes)
        after = lab.compare(config, folder, notes=Notes(), **resume)
    metrics = {run.folder: run.metrics for run in after.runs}
    assert len(metrics) == 4
    assert {run: metrics[run] for run in before} == before
