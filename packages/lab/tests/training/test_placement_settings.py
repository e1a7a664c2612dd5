"""Placements as settings: their norms, refused combinations, and their record in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import Configure, compare, of_task

from powernorm.errors import InputError
from powernorm.norms import Norm
from powernorm_lab.recipes import recipe
from powernorm_lab.report import read_comparison
from powernorm_lab.report.loading import _RUN_NAME
from powernorm_lab.runs import PLACEMENTS, run_name
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.builtin import check_norms
from powernorm_lab.tasks.registry import task_of

TENSORIZED = ["model.architecture=tensorized", "model.num_heads=1"]


@pytest.mark.parametrize(
    ("task", "assignments", "message"),
    [
        ("lm", ["model.placement=peri-ln"], "choose one of pre, post, sandwich, peri, out, mix"),
        ("lm", ["model.qk_norm=rms"], "choose one of per_head, whole"),
        ("lm", ["model.qk_norm_type=bn"], r"set model\.qk_norm to per_head or whole"),
        ("lm", [*TENSORIZED, "model.placement=normformer"], "tensorized attention"),
        ("lm", [*TENSORIZED, "model.placement=bn-linear"], "tensorized attention"),
        ("lm", [*TENSORIZED, "model.qk_norm=whole"], r"set model\.qk_norm=none"),
        ("lm-char", ["model.placement=bn-linear"], "attention to a memory"),
        ("ner", ["model.qk_norm=per_head"], "directional attention"),
        ("image", ["model.placement=peri"], "is not a setting"),
    ],
)
def test_what_does_not_fit_is_refused(
    configure: Configure, task: str, assignments: list[str], message: str
) -> None:
    config: Any = recipe("image", "smoke") if task == "image" else of_task(task, configure())
    with pytest.raises(InputError, match=message):
        override(config, assignments)


@pytest.mark.parametrize(
    ("assignments", "options", "message"),
    [
        (["model.qk_norm=whole", "model.qk_norm_type=rsm"], {}, "rsm"),
        # Groups that divide the model's features, but not those of a head or the hidden ones.
        (["model.qk_norm=per_head", "model.qk_norm_type=same"], {"bn": {"groups": 16}}, "groups"),
    ],
)
def test_norms_of_all_widths_are_checked_first(
    configure: Configure, assignments: list[str], options: dict[str, Any], message: str
) -> None:
    config = override(configure(norms=("bn",), norm_options=options), assignments)
    with pytest.raises(InputError, match=message):
        check_norms(config)


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
