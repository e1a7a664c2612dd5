"""Placements as settings: their norms, refused combinations, and their record in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import Configure, compare

from powernorm.norms import Norm
from powernorm_lab.report import read_comparison
from powernorm_lab.report.loading import _RUN_NAME
from powernorm_lab.runs import PLACEMENTS, run_name
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.registry import task_of


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_widths_that_are_checked_are_those_of_the_model(
    configure: Configure, placement: str
) -> None:
    changes = [f"model.placement={placement}", "model.feedforward_features=24"]
    config: Any = override(configure(), [*changes, "model.qk_norm=per_head"])
    config = override(config, ["model.qk_norm_type=same"])
    task = task_of(config)
    model = task.build(config, "bn", (11,), 0)
    widths = {module.num_features for module in model.modules() if isinstance(module, Norm)}
    assert widths == set(task.norm_widths(config))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_folders_name_says_the_placement(placement: str) -> None:
    for norm in ("bn", "pn-static", "my.module+Norm"):
        found = _RUN_NAME.fullmatch(run_name(norm, placement, 3))
        assert found is not None
        assert found.groupdict() == {"norm": norm, "placement": placement, "seed": "3"}


def test_a_run_and_its_report_name_the_placement(configure: Configure, tmp_path: Path) -> None:
    config: Any = override(
        configure(norms=("bn",)),
        [
            *("model.placement=bn-ffn", "model.qk_norm=per_head", "model.qk_norm_type=same"),
        ],
    )
    (run,) = compare(config, tmp_path).runs
    assert (run.placement, run.folder) == ("bn-ffn", "bn-bn-ffn-seed0")
    comparison = read_comparison(tmp_path)
    assert comparison.where == "placement bn-ffn"
    assert comparison.runs[0].placement == "bn-ffn"
    content = torch.load(tmp_path / run.folder / "checkpoints/last.ckpt", weights_only=True)
    assert "layers.0.feedforward.0.norm.running_mean" in content["states"]["model"]
