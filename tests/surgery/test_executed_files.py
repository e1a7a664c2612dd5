"""Sizes of the walks through the package: files that run, and runs of the model in a fold.

A ceiling sinks when files are merged. It rises for a good reason only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import powernorm

transformers: Any = pytest.importorskip("transformers")
ROOT = str(Path(powernorm.__file__).parent)


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return transformers.BertModel(config).eval()


def inputs() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(0, 50, (2, 6)),
        "attention_mask": torch.ones(2, 6, dtype=torch.long),
    }


def files_of(call: Callable[[], object]) -> set[str]:
    """Files of the package with a function that the call runs; imports do not count."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(ROOT):
            seen.add(code.co_filename.removeprefix(f"{ROOT}/"))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


def folding() -> Callable[[], object]:
    model = bert()
    return lambda: powernorm.fold(model, inputs(), keep="statistics")


def swapping() -> Callable[[], object]:
    model = bert()
    return lambda: powernorm.swap(model, "bn")


def training_step() -> Callable[[], object]:
    """The third one: the first ones prepare the call."""
    norm = powernorm.build_norm("pn", 64, warmup_steps=0)
    x = torch.randn(8, 16, 64, requires_grad=True)

    def step() -> None:
        norm(x).square().mean().backward()

    step()
    step()
    return step


@pytest.mark.parametrize(
    ("prepared", "ceiling"), [(folding, 25), (swapping, 28), (training_step, 13)]
)
def test_few_files_run(prepared: Callable[[], Callable[[], object]], ceiling: int) -> None:
    prepared()()  # caches and late imports
    files = files_of(prepared())
    assert len(files) <= ceiling, sorted(files)


@pytest.mark.parametrize("swapped", [True, False])
def test_a_plan_runs_the_model_three_times(swapped: bool) -> None:
    """Once each for functional norms, for effects and for the graph; then once to try the fold."""
    model, runs = bert(), []
    if swapped:
        powernorm.swap(model, "bn")
        model.train()(**inputs())
        model.eval()
    hook = model.register_forward_pre_hook(lambda *_: runs.append(1))
    plan = powernorm.plan_fold(model, inputs(), keep="nothing" if swapped else "statistics")
    assert len(runs) == 3
    plan.apply(verify=False)
    hook.remove()
    assert len(runs) == 4
