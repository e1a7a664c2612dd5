"""Two processes train a tagger as one does, even if one of them has no sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.training.tiny_training import compare
from tiny_entities import TRAINING, tiny_entities, write_entities

from norms.processes import run_processes
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.trained_models import load_trained

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run(config: ComparisonSettings, out: Path) -> dict[str, Any]:
    (found,) = compare(config, out).runs
    assert found.status == "finished"
    return {**found.metrics, **(found.tid or {})}  # type: ignore[dict-item]


def run_all(rank: int, configs: dict[str, ComparisonSettings], out: Path) -> dict[str, Any]:
    del rank
    return {name: run(config, out / name) for name, config in configs.items()}


def test_two_processes_equal_one(tmp_path: Path) -> None:
    path = write_entities(tmp_path / "names")
    configs = {}
    for strategy in ("ddp", "fsdp2"):
        training = replace(TRAINING, max_steps=6, validate_every=3, strategy=strategy)
        # An odd number of sentences: one process has more; the last validation batch has one.
        config = tiny_entities(
            path,
            norms=("rbn",),
            training=replace(training, log_every=1, accelerator="cpu"),
            data={"batch_size": 7, "evaluation_batch_size": 13},
            norm_options={"rbn": {"mean_penalty": 3.0}},
        )
        # A larger eps, because Adam makes large steps from rounding errors.
        configs[strategy] = replace(config, optimizer=replace(config.optimizer, eps=1e-3))
    out = tmp_path / "two"
    first, second = run_processes(run_all, 2, tmp_path, configs, out)
    assert first == second
    expected = run(configs["ddp"], tmp_path / "one")
    states = {}
    folders = {"one": tmp_path / "one", **{name: out / name for name in configs}}
    for name, folder in folders.items():
        (last,) = folder.glob("*/checkpoints/last.ckpt")
        states[name] = load_trained(last).model.state_dict()
    for name in configs:
        assert first[name] == pytest.approx(expected, rel=1e-4), name
        torch.testing.assert_close(states[name], states["one"], rtol=1e-3, atol=1e-5)
    rows = [
        next(folder.glob("*/metrics.csv")).read_text().split("\n") for folder in folders.values()
    ]
    losses = [[line.split(",")[5] for line in lines[1:] if line] for lines in rows]
    for found in losses[1:]:
        assert [float(x) for x in found if x] == pytest.approx(
            [float(x) for x in losses[0] if x], rel=1e-3
        )
