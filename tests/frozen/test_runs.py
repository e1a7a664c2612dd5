"""Runs that were recorded before the laboratory was rebuilt repeat, load and go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_runs import (
    BUFFERS,
    OTHERS,
    RUNS,
    TASKS,
    TWO_PROCESSES,
    buffers,
    losses,
    measured,
    recorded,
    recorded_config,
    resumable,
    train,
    unpacked,
)

from powernorm.lab.report import read_comparison
from powernorm.lab.tasks.builtin import compare
from powernorm.lab.tasks.trained_models import load_trained

IS_RECORDED_KIND = (
    torch.backends.cpu.get_cpu_capability() == "AVX512" and not torch.cpu._is_amx_tile_supported()
)
"""Whether this processor computes as the one that recorded: vectors as wide, and none of the
matrix units for which the libraries of linear algebra have other code."""
RELATIVE = 1e-5 if IS_RECORDED_KIND else 0.25
"""Of a number to the recorded one: other processors add in another order, and 20 steps of training
enlarge what that changes."""
RESUMABLE = [case for case in (*TASKS, *OTHERS) if resumable(case)]


def assert_close(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_close(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        if wanted and isinstance(wanted[0], float):
            scale = max(map(abs, wanted))
            worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
            assert worst <= RELATIVE * scale, where
            return
        for index, value in enumerate(wanted):
            assert_close(found[index], value, f"{where}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=RELATIVE, abs=1e-12), where
    else:
        assert found == wanted, where


def numbers(rows: list[dict[str, str]]) -> list[dict[str, float | str]]:
    return [{name: float(cell) if cell else "" for name, cell in row.items()} for row in rows]


def recorded_then(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """What is found, without the scores that tagging and bytes did not tell then."""
    later = ("valid_score", "valid_accuracy", "test_accuracy")
    known = {name: value for name, value in found.items() if name not in later or wanted.get(name)}
    return known | {name: wanted[name] for name in later if wanted.get(name) == ""}


def assert_repeats(case: str, out: Path, names: list[str] | None = None) -> None:
    """Losses, results and running statistics are those that were recorded."""
    folders = [path for path in (RUNS / case).iterdir() if (path / BUFFERS).exists()]
    for recorded_run in folders:
        if names is not None and recorded_run.name not in names:
            continue
        run = out / recorded_run.name
        rows, wanted_rows = numbers(losses(run)), numbers(losses(recorded_run))
        pairs = zip(rows, wanted_rows, strict=True)
        assert_close([recorded_then(*pair) for pair in pairs], wanted_rows, str(run))
        result, wanted = (
            json.loads((folder / "result.json").read_text()) for folder in (run, recorded_run)
        )
        result["metrics"] = recorded_then(result["metrics"], wanted["metrics"])
        assert_close(measured(result), measured(wanted), str(run))
        if IS_RECORDED_KIND:
            assert_close(buffers(run), json.loads((recorded_run / BUFFERS).read_text()), str(run))


@pytest.mark.parametrize("case", [*TASKS, *OTHERS])
def test_a_recorded_comparison_repeats(case: str, tmp_path: Path) -> None:
    train(case, tmp_path)
    assert_repeats(case, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_recorded_comparison_in_two_processes_repeats(tmp_path: Path) -> None:
    train(TWO_PROCESSES, tmp_path)
    assert_repeats(TWO_PROCESSES, tmp_path)


@pytest.mark.parametrize("case", RESUMABLE)
def test_a_run_that_was_interrupted_before_the_rebuild_goes_on(case: str, tmp_path: Path) -> None:
    """From the checkpoint of then it comes to the same end."""
    run = unpacked(case, tmp_path / "runs")
    assert load_trained(run).step == 10
    config = replace(recorded_config(case), norms=(str(resumable(case)),))
    compare(config, tmp_path / "runs", resume=True)
    assert_repeats(case, tmp_path / "runs", [run.name])


@pytest.mark.parametrize("case", list(recorded()))
def test_a_recorded_comparison_is_read(case: str) -> None:
    comparison = read_comparison(RUNS / case)
    assert {run.status for run in comparison.runs} == {"finished"}
    stored = json.loads((RUNS / case / "results.json").read_text())
    assert [run.metrics for run in comparison.runs] == [run["metrics"] for run in stored["runs"]]
