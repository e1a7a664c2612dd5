"""Effect of one training step on the state of a norm: the same for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import powernorm
from cases import KEEPING_STATE, STATEFUL, Case, case_id, states
from powernorm.norms.carrier import CarrierNorm

every_stateful = pytest.mark.parametrize("case", STATEFUL, ids=case_id)


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, 8, generator=generator).requires_grad_()


def same_state(norm: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in states(norm).items())


@every_stateful
def test_a_skipped_step_leaves_nothing(case: Case) -> None:
    """Whether the norm updates in the forward or in the backward, and with or without one."""
    norm, never = case.build(), case.build()
    for model in (norm, never):
        model(batch(0)).square().sum().backward()
    before = states(norm)
    for backward in (False, True):
        with powernorm.training_step(norm) as step:
            loss = norm(batch(1)).square().sum() * float("nan")
            if backward:
                loss.backward()
            step.skip()
        assert same_state(norm, before)
        assert isinstance(norm, powernorm.norms.BatchStatisticsNorm)
        assert not norm.is_holding
    if isinstance(norm, powernorm.RegularizedBatchNorm):
        assert not norm.has_penalty
    for model in (norm, never):
        model.zero_grad()
        x = batch(2)
        model(x).square().sum().backward()
    assert same_state(norm, states(never))


@every_stateful
def test_a_batch_that_overflows_poisons_nothing(case: Case) -> None:
    """Without any scope, as when a GradScaler skips: what is not finite is left out."""
    norm = case.build()
    norm(batch(0)).square().sum().backward()
    (norm(batch(1)).square().sum() * float("inf")).backward()
    with torch.no_grad():
        spoiled = batch(2) * 1e30 * 1e30
    norm(spoiled.requires_grad_()).sum().backward()
    for name, value in states(norm).items():
        assert bool(value.isfinite().all()), name


def test_the_penalty_of_a_skipped_step_is_no_part_of_the_next() -> None:
    norm = powernorm.RegularizedBatchNorm(8, mean_penalty=1.0)
    expected = copy.deepcopy(norm)
    losses = []  # a loop that keeps its losses keeps their graphs
    with powernorm.training_step(norm) as step:
        losses.append(norm(batch(0) * float("nan")).sum())
        step.skip()
    with powernorm.training_step(norm):
        y = norm(batch(1)).sum()
        found = powernorm.penalty(norm, num_tokens=20)
        (y + found).backward()
    expected(batch(1))
    assert torch.equal(found, powernorm.penalty(expected, num_tokens=20))


@every_stateful
def test_passes_without_gradients(case: Case) -> None:
    """In training mode as in torch: what updates in the forward does, what in the backward not."""
    norm = case.build()
    before = states(norm)
    with torch.no_grad():
        norm(batch(0))
    assert same_state(norm, before) == isinstance(norm, CarrierNorm)
    before = states(norm)
    norm.eval()(batch(0))
    with powernorm.training_step(norm.train()) as step, torch.no_grad():
        norm(batch(0))
        step.skip()
    assert same_state(norm, before)


def zero(norm: nn.Module) -> None:
    norm.get_buffer("num_batches_tracked").zero_()


def replace(norm: nn.Module) -> None:
    norm.num_batches_tracked = torch.tensor(0)


@pytest.mark.parametrize("write", [zero, replace])
@pytest.mark.parametrize("is_forward_pending", [False, True])
@pytest.mark.parametrize("case", KEEPING_STATE, ids=case_id)
def test_a_counter_that_is_set_by_hand(
    case: Case, is_forward_pending: bool, write: Callable[[nn.Module], None]
) -> None:
    """The layer continues like a copy of it, which reads its counter at the start."""
    norm = case.build()
    for seed in range(8):
        norm(batch(seed)).sum().backward()
    pending = norm(batch(8)).square().sum()
    write(norm)
    if is_forward_pending:
        pending.backward()
    fresh = copy.deepcopy(norm)
    for seed in (9, 10):
        x, other = batch(seed), batch(seed)
        y, expected = norm(x), fresh(other)
        torch.testing.assert_close(y, expected)
        for result in (y, expected):
            result.square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
        assert same_state(norm, states(fresh))
    torch.testing.assert_close(norm.eval()(x), fresh.eval()(x))


@pytest.mark.parametrize("warmup_steps", [0, 1, 2])
def test_forwards_in_flight_at_the_end_of_a_warmup(warmup_steps: int) -> None:
    """The batches of PRepBN that no warm-up counts are those of the average."""
    norm = powernorm.ProgressiveRepBatchNorm(8, momentum=0.3, warmup_steps=warmup_steps)
    plain = powernorm.RepBatchNorm(8, momentum=0.3)
    for y in [norm(batch(seed)) for seed in range(4)]:
        y.square().sum().backward()
    for seed in range(warmup_steps, 4):
        plain(batch(seed))
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var)
