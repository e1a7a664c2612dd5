"""Killed at any moment, in whatever way, what is resumed comes to the same results."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.killing import SUBJECTS

OF_THE_CLOCK = {
    *("seconds", "tokens_per_second", "examples_per_second", "decoding_tokens_per_second"),
    *("measured_seconds", "measured_tokens", "measured_examples", "ran_on"),
}
NOT_COMPARED = {".html", ".db"}


def without_clock(value: Any) -> Any:
    """Return the same value without times and machines, tensors as lists."""
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in OF_THE_CLOCK}
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return [without_clock(v) for v in value] if isinstance(value, list | tuple) else value


def said(path: Path) -> Any:
    """Return the content of a file, read where its form is known."""
    if path.suffix == ".json":
        return without_clock(json.loads(path.read_text()))
    if path.suffix == ".csv":
        with path.open() as stream:
            return without_clock(list(csv.DictReader(stream)))
    if path.suffix == ".ckpt":
        return without_clock(torch.load(path, weights_only=True))
    return path.read_bytes()


def files(folder: Path) -> list[Path]:
    """Files that both must hold; TensorBoard's files have the time in their names."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        path
        for path in found
        if path.suffix not in NOT_COMPARED and "tensorboard" not in path.parts
    )


def check(folder: Path, subject: str, kills: int) -> dict[str, int]:
    seed = random.Random(subject).randrange(1000)
    script = Path(__file__).parent / "killing.py"
    done = subprocess.run(
        [sys.executable, script, subject, folder, str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=120 + 60 * kills,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    assert sum(number for end, number in counts.items() if end != "over") == kills
    whole = folder / "whole"
    expected = files(whole)
    assert {path.name for path in expected} >= {"result.json", "metrics.csv"}
    resumed = sorted(folder.glob("killed-*"))
    assert resumed
    for out in resumed:
        assert files(out) == expected
        for path in expected:
            assert said(out / path) == said(whole / path), out / path
        assert not list(out.rglob(".*")), out
    return counts


@pytest.mark.parametrize("subject", ["own", pytest.param("lm", marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path: Path, subject: str) -> None:
    check(tmp_path, subject, 4)


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_killed_at_many_random_moments(tmp_path: Path, subject: str) -> None:
    counts = check(tmp_path, subject, 15)  # over 100 together
    assert set(counts) >= {"killed", "stopped"}
