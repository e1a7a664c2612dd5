"""Activation checkpointing in eager mode: the second forward sees what the first one saw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from cases import KEEPING_STATE, Case, case_id, states

every_stateful = pytest.mark.parametrize("case", KEEPING_STATE, ids=case_id)


class Layer(nn.Module):
    """A norm in a foreign model: nobody hands it a mask."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(8, 8), norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.into(x))
        return y.tanh()


def build(case: Case) -> Layer:
    torch.manual_seed(0)
    return Layer(case.build())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 8, generator=generator) * (1 + seed)
    return x.requires_grad_(), torch.rand(3, 5, generator=generator) < 0.3


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x.grad, y.grad), name
    for name, value in states(a).items():
        assert torch.equal(value, b.get_buffer(name)), name


@every_stateful
def test_equals_the_plain_run(case: Case) -> None:
    plain, repeated = build(case), build(case)
    for t in range(4):
        x, mask = batch(t)
        with powernorm.padding_mask(mask):
            expected = plain(x)
            y = checkpoint(repeated, x, use_reentrant=False)
        assert torch.equal(y, expected)
        expected.square().sum().backward()
        y.square().sum().backward()  # outside the scope of the mask
    assert_same(plain, repeated)


@every_stateful
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_several_forwards_before_their_backwards(case: Case, order: tuple[int, ...]) -> None:
    plain, repeated = build(case), build(case)
    for start in (0, 3):
        expected, losses = [], []
        for t in range(start, start + 3):
            x, mask = batch(t)
            with powernorm.padding_mask(mask):
                expected.append(plain(x).square().sum())
                losses.append(checkpoint(repeated, x, use_reentrant=False).square().sum())
        for i in order:
            expected[i].backward()
            losses[i].backward()
    assert_same(plain, repeated)


def test_penalty_under_checkpointing_has_its_gradient() -> None:
    grads = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        layer = Layer(powernorm.RegularizedBatchNorm(8, mean_penalty=1.0, var_penalty=0.5))
        for t in range(2):
            x, _ = batch(t)
            y = checkpoint(layer, x, use_reentrant=False) if wrapped else layer(x)
            (y.sum() + powernorm.penalty(layer, num_tokens=15)).backward()
        grads.append(layer.into.weight.grad)
    assert torch.equal(*grads)


def test_nested_checkpoints_and_two_masks() -> None:
    def outer(layer: Layer, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(layer, x, use_reentrant=False)
        return y * 2

    plain, repeated = (build(Case("bn")) for _ in range(2))
    losses = []
    for t in range(2):
        x, mask = batch(t)
        with powernorm.padding_mask(mask):
            expected = 2 * plain(x)
            y = checkpoint(outer, repeated, x, use_reentrant=False)
        losses.append((expected.square().sum(), y.square().sum()))
    for expected_loss, loss in losses:
        expected_loss.backward()
        loss.backward()
    assert_same(plain, repeated)


def test_a_second_backward_sees_the_same_mask() -> None:
    plain, repeated = (build(Case("bn")) for _ in range(2))
    outputs = []
    for t in range(2):
        x, mask = batch(t)
        with powernorm.padding_mask(mask):
            outputs.append((plain(x), checkpoint(repeated, x, use_reentrant=False)))
    for y in outputs[0]:
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
    assert_same(plain, repeated)


@pytest.mark.parametrize("name", ["pn", "brn"])
def test_a_pass_without_gradients_in_between_changes_nothing(name: str) -> None:
    case = Case(name, {"warmup_steps": 0})
    plain, repeated = build(case), build(case)
    for _ in range(4):
        x, _ = batch(1)
        with torch.no_grad():
            repeated(x)
        plain(x).square().sum().backward()
        checkpoint(repeated, x, use_reentrant=False).square().sum().backward()
    assert_same(plain, repeated)


def test_released_variant_in_evaluation_inside_a_checkpoint() -> None:
    norm = powernorm.BatchNorm(8, variant="released").eval()
    x, mask = batch(0)
    with powernorm.padding_mask(mask):
        y = checkpoint(norm, x, use_reentrant=False)
    y.sum().backward()
    assert not x.grad[mask].any()


def test_penalty_is_counted_once_where_no_hook_clears_it() -> None:
    values = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        norm = powernorm.RegularizedBatchNorm(8)
        linear = nn.Linear(8, 8)
        own = []
        for t in range(4):
            x, _ = batch(t)
            call = nn.Sequential(norm, linear)
            y = checkpoint(call, x, use_reentrant=False) if wrapped else call(x)
            loss = y.sum() + norm.penalty()
            own.append(norm.penalty().item())
            torch.autograd.grad(loss, list(linear.parameters()))
        values.append(own)
    assert values[0] == values[1]


def test_a_shared_layer_half_of_it_blind_raises() -> None:
    norm = powernorm.RegularizedBatchNorm(8)
    x, _ = batch(0)
    y = checkpoint(norm, x, use_reentrant=True) + norm(x)
    with pytest.raises(powernorm.InputError, match="penalty would do nothing"):
        norm.penalty()
    with pytest.raises(powernorm.InputError, match="use_reentrant=False"):
        y.sum().backward()
