"""Each method that removes the norms of a model, without the training around it."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
from torch import nn

import powernorm
from powernorm.errors import InputError
from powernorm.inspection.batches import call_model
from powernorm.surgery.removal import (
    MethodName,
    Removal,
    build_removal,
    call_order,
    removable_norms,
    removal_steps,
)
from refusals import refuses
from surgery.removal.small_models import Block, data, stack

METHODS = get_args(MethodName)


def removed(name: MethodName, original: nn.Module, num_steps: int = 30) -> Removal:
    """A removal that is fitted, and through all its steps."""
    removal = build_removal(name, copy.deepcopy(original), num_steps)
    removal.install()
    removal.fit(original, data(), call_model)
    removal.model.train()
    for step in range(num_steps + 1):
        removal.step(step)
        if name in ("taper", "prepbn"):  # their averages move in the backward
            removal.model(data()[step % 6]).sum().backward()
    removal.model.eval()
    removal.finish(data(), call_model)
    return removal


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_ends_in_a_model_that_folds_and_is_near_the_original(
    name: MethodName, norm: type[nn.Module]
) -> None:
    original = stack(norm)
    if name == "match-centered" and norm is nn.RMSNorm:
        refuses(r"does not center: method\.name=match", removed, name, original)
        return
    removal = removed(name, original)
    x, model = data(1)[0], removal.model.eval()
    with torch.no_grad():
        error = (model(x) - original(x)).square().mean() / original(x).var()
    if name != "prepbn":  # which training alone brings near
        assert float(error) < 0.5  # 1 is what the mean alone would do
    report = powernorm.fold(model, x)
    assert {row.action for row in report.rows} == {"fold"}
    assert [row.name for row in removal.rows] == [
        "blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm",
    ]  # fmt: skip


def test_frozen_layers_divide_by_the_mean_deviation_of_their_inputs() -> None:
    original = stack()
    seen: list[torch.Tensor] = []
    hook = original.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    for batch in data():
        original(batch)
    hook.remove()
    expected = (torch.cat(seen).var(-1, correction=0) + 1e-5).sqrt().mean()
    removal = removed("freeze", original)
    assert removal.rows[-1].deviation == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_goes_on_from_its_state(name: MethodName) -> None:
    """A copy that loads the states computes the same, in training too, and then goes alike."""
    original, x = stack(), data(1)[0]
    first, second = (build_removal(name, copy.deepcopy(original), 30) for _ in range(2))
    first.install()
    first.fit(original, data(), call_model)
    for step in range(7):
        first.step(step)
        first.model.train()(x).sum().backward()
    second.install()
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    for removal in (first, second):
        removal.step(7)
    torch.testing.assert_close(second.model.train()(x), first.model.train()(x), rtol=0, atol=0)
    assert second.rows == first.rows


@pytest.mark.parametrize("name", ["freeze-in-turn", "taper", "prepbn"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, powernorm.LayerNorm, powernorm.RMSNorm])
def test_what_goes_later_is_at_first_the_norm_itself(
    name: MethodName, norm: type[nn.Module]
) -> None:
    original = stack(norm)
    removal = build_removal(name, copy.deepcopy(original), 30)
    removal.install()
    x = data(1)[0]
    torch.testing.assert_close(removal.model.eval()(x), original(x), rtol=1e-12, atol=1e-12)


def test_fading_norm_and_batch_norm_share_by_the_schedule() -> None:
    """λ falls from 1 to 0 in 0.8 of the updates; then the statistics of the batch are all."""
    removal = build_removal("prepbn", stack(), 10, accumulation=2)
    removal.install()
    shares = []
    for _ in range(20):
        shares.append(removal.layers["norm"].share)
        removal.model.train()(data(1)[0]).sum().backward()
    assert shares[::2] == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0])
    assert shares[1::2] == shares[::2]


def test_statistics_at_the_end_are_those_of_the_final_weights_without_padding() -> None:
    """Whatever the training left in the averages; by a mask that the model is given."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
            del padding_mask
            return self.head(self.norm(self.first(x)))

    torch.manual_seed(0)
    removal = build_removal("prepbn", Masked().double(), 4)
    removal.install()
    mask = torch.arange(6) >= torch.tensor([[6], [3], [2], [5]])
    batches = [{"x": x, "padding_mask": mask} for x in data(3)]
    removal.model.train()(data(6)[5], mask).sum().backward()
    removal.model.eval()
    removal.finish(batches, call_model)
    first, norm = removal.model.first, removal.layers["norm"]
    valid = torch.cat([first(x)[~mask] for x in data(3)])
    torch.testing.assert_close(norm.running_mean, valid.mean(0).to(norm.running_mean))
    torch.testing.assert_close(norm.running_var, valid.var(0).to(norm.running_var))
    assert norm.is_static


def test_one_after_the_other_goes_feed_forward_attention_final() -> None:
    removal = build_removal("freeze-in-turn", stack(), 300)
    removal.install()
    removal.fit(stack(), data(), call_model)
    gone = {name: step for step in range(301) for name in removal.step(step)}
    assert gone == {
        "blocks.0.norm2": 20, "blocks.1.norm2": 32,
        "blocks.0.norm1": 44, "blocks.1.norm1": 74,
        "norm": 104,
    }  # fmt: skip


def test_schedule_is_the_published_one_for_twelve_layers() -> None:
    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(nn.LayerNorm) for _ in range(12))
            self.norm = nn.LayerNorm(8)

    steps = removal_steps(removable_norms(Gpt()), 300)
    mlp = [steps[f"blocks.{index}.norm2"] for index in range(12)]
    assert mlp == list(range(20, 44, 2))
    assert [steps["blocks.0.norm1"], steps["blocks.1.norm1"], steps["norm"]] == [44, 49, 104]


def test_norms_that_cannot_be_removed_are_named() -> None:
    refuses("Linear has no norms", removable_norms, nn.Linear(2, 2))
    with pytest.raises(InputError, match="1 is a BatchNorm1d, and only LayerNorm and RMSNorm"):
        removable_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_norms_that_do_not_run_are_named() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with pytest.raises(InputError, match=r"does not use .idle. on the first batch"):
        call_order(Idle().double(), ["used", "idle"], data(1)[0], call_model)
