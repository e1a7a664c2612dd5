"""Two processes divide the rows of a batch, each with the memory of its rows."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.training.tiny_training import compare
from tiny_characters import tiny_characters, write_stream

from norms.processes import run_processes
from powernorm_lab.engine.events import Event, StepsDone
from powernorm_lab.settings.comparison import ComparisonSettings

pytestmark = pytest.mark.distributed


def config_of(stream: Path, norm: str) -> ComparisonSettings:
    """Return settings with three rows for two processes, and without dropout."""
    config = tiny_characters(
        stream,
        norms=(norm,),
        model={"dropout": 0.0},
        # With its small eps Adam makes large steps from rounding errors.
        optimizer={"eps": 1e-3},
        training={"log_every": 1, "max_steps": 8},
    )
    return replace(config, training=replace(config.training, accelerator="cpu"))


def stop_at_seven(event: Event) -> None:
    if isinstance(event, StepsDone) and event.step >= 7:
        raise RuntimeError("stopped by the test")


def train(rank: int, stream: Path, out: Path) -> dict[str, Any]:
    del rank
    found = {}
    for norm in ("ln", "bn"):
        (run,) = compare(config_of(stream, norm), out / norm).runs
        found[norm] = vars(run)
    (run,) = compare(config_of(stream, "ln"), out / "one-to-two", resume=True).runs
    return {**found, "one-to-two": vars(run)}


def log(out: Path) -> list[dict[str, str]]:
    (path,) = out.glob("*/metrics.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def memory(out: Path) -> list[dict[str, torch.Tensor]]:
    (path,) = out.glob("*/checkpoints/last.ckpt")
    content = torch.load(path, weights_only=True)
    lanes: list[dict[str, torch.Tensor]] = content["states"]["memory"]["lanes"]
    return lanes


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    stream = write_stream(tmp_path / "stream")
    two, one = tmp_path / "two", tmp_path / "one"
    (stopped,) = compare(config_of(stream, "ln"), two / "one-to-two", on_event=stop_at_seven).runs
    assert stopped.status == "failed"
    first, second = run_processes(train, 2, tmp_path, stream, two)
    for norm in ("ln", "bn"):
        (expected,) = compare(config_of(stream, norm), one / norm).runs
        names = [norm, "one-to-two"] if norm == "ln" else [norm]
        for name in names:
            assert first[name]["status"] == second[name]["status"] == "finished"
            for metric, value in expected.metrics.items():
                assert first[name]["metrics"][metric] == pytest.approx(value, rel=1e-4), metric
                assert second[name]["metrics"][metric] == first[name]["metrics"][metric]
            for row, twin in zip(log(one / norm), log(two / name), strict=True):
                for column in ("train_loss", "valid_loss"):
                    assert bool(row[column]) == bool(twin[column])
                    if row[column]:
                        assert float(twin[column]) == pytest.approx(float(row[column]), rel=1e-4)
            torch.testing.assert_close(memory(two / name), memory(one / norm), rtol=1e-3, atol=1e-4)
