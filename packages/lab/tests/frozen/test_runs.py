"""Recorded runs repeat, load and resume from their middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from loop_checkpoints import state_of_run, write_checkpoint
from recorded_runs import (
    BUFFERS,
    IN_PROCESSES,
    LOGS,
    OTHERS,
    PROCESSOR,
    RUNS,
    STATE,
    TASKS,
    buffers,
    fingerprint,
    interrupt,
    measured,
    one_way,
    recorded,
    resumable,
    resume,
    rows,
    train,
)
from recorded_states import read_state, write_state

from covering import some_default
from powernorm_lab.report import read_comparison

RESUMABLE = [case for case in (*TASKS, *OTHERS) if resumable(case)]


class Process(NamedTuple):
    """Process in which recorded runs are repeated."""

    executor: ProcessPoolExecutor
    relative: float
    """Relative tolerance: if this processor adds in another order than the recording one, 20 steps
    of training amplify the differences."""


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with one_way() as executor:
        is_same = executor.submit(fingerprint).result() == PROCESSOR.read_text().strip()
        yield Process(executor, 1e-5 if is_same else 0.25)


def assert_close(found: Any, wanted: Any, relative: float, where: str) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_close(found[key], value, relative, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        if wanted and isinstance(wanted[0], float):
            scale = max(map(abs, wanted))
            worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
            assert worst <= relative * scale, where
            return
        for index, value in enumerate(wanted):
            assert_close(found[index], value, relative, f"{where}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=relative, abs=1e-12), where
    else:
        assert found == wanted, where


def numbers(found: list[dict[str, str]]) -> list[dict[str, float | str]]:
    return [{name: _number(cell) for name, cell in row.items()} for row in found]


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def assert_repeats(case: str, out: Path, relative: float, names: list[str] | None = None) -> None:
    """Assert that logs, results and running statistics equal the recorded ones."""
    for recorded_run in (path.parent for path in (RUNS / case).glob(f"*/{BUFFERS}")):
        if names is not None and recorded_run.name not in names:
            continue
        run = out / recorded_run.name
        for name in LOGS:
            found, wanted = (numbers(rows(folder, name)) for folder in (run, recorded_run))
            # Columns that are newer than the recording are ignored.
            found = [{key: row[key] for key in row if key in wanted[0]} for row in found]
            if relative < 1e-3 or name == "metrics.csv":
                assert_close(found, wanted, relative, f"{run}/{name}")
        result, recorded_result = (
            json.loads((folder / "result.json").read_text()) for folder in (run, recorded_run)
        )
        assert_close(measured(result), measured(recorded_result), relative, str(run))
        if relative < 1e-3:
            kept = json.loads((recorded_run / BUFFERS).read_text())
            assert_close(buffers(run), kept, relative, str(run))


@pytest.mark.parametrize(
    "case",
    # Runs from the middle repeat the second half of the others.
    some_default([*TASKS, *OTHERS], "lm"),
)
def test_a_recorded_comparison_repeats(case: str, process: Process, tmp_path: Path) -> None:
    process.executor.submit(train, case, tmp_path).result()
    assert_repeats(case, tmp_path, process.relative)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", IN_PROCESSES)
def test_a_recorded_comparison_in_two_processes_repeats(
    case: str, process: Process, tmp_path: Path
) -> None:
    process.executor.submit(train, case, tmp_path).result()
    assert_repeats(case, tmp_path, process.relative)


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMABLE)
def test_a_run_goes_on_from_its_recorded_middle(
    case: str, process: Process, tmp_path: Path
) -> None:
    name = process.executor.submit(resume, case, tmp_path).result()
    assert_repeats(case, tmp_path, process.relative, [name])


@pytest.mark.parametrize("case", ["lm", "lm-char", "float16"])
def test_a_state_is_read_as_it_was_written(case: str, process: Process, tmp_path: Path) -> None:
    """This holds for the file of a recording and for a checkpoint."""
    run = process.executor.submit(interrupt, case, tmp_path / "runs", 11).result()
    state = state_of_run(run)
    write_state(tmp_path / STATE, state)
    write_checkpoint(run, read_state(tmp_path / STATE, tmp_path))
    again = state_of_run(run)
    for part in ("weights", "optimizer", "random", "memory"):
        found, wanted = getattr(again, part), getattr(state, part)
        torch.testing.assert_close(found or {}, wanted or {}, rtol=0, atol=0, msg=part)
    for part in ("step", "scaler", "losses", "valid_losses", "valid_scores"):
        assert getattr(again, part) == getattr(state, part), part


@pytest.mark.parametrize("case", list(recorded()))
def test_a_recorded_comparison_is_read(case: str) -> None:
    comparison = read_comparison(RUNS / case)
    assert {run.status for run in comparison.runs} == {"finished"}
    stored = json.loads((RUNS / case / "results.json").read_text())
    assert [run.metrics for run in comparison.runs] == [run["metrics"] for run in stored["runs"]]
