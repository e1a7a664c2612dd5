from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diagnosis.models import BATCH_STATISTICS_NORMS, Batch, Masked, batches, inputs_of
from powernorm.diagnosis import EvaluationGap, evaluation_gap
from powernorm.errors import InputError


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    y = model(*batch)
    tokens = y if batch[1] is None else y[~batch[1]]
    tokens = tokens.reshape(-1, tokens.shape[-1])
    return tokens.abs().mean(), len(tokens)


def trained(norm: str) -> nn.Module:
    torch.manual_seed(0)
    model = Masked(norm).train()
    for batch in batches(3, seed=1):
        model(*batch).square().sum().backward()
    return model


def by_hand(model: nn.Module, data: list[Batch]) -> EvaluationGap:
    """In evaluation with buffers that were set to the statistics of each layer's input."""
    model = copy.deepcopy(model).eval()
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for batch in data:
        value, number = loss(model, batch)
        sums[0] += value.detach() * number
        other = copy.deepcopy(model)
        for layer in (other.lower, other.upper):  # in the order of the calls
            with inputs_of([layer]) as seen:
                other(*batch)
            tokens = seen[layer][0]
            if layer.centered:
                layer.running_mean.copy_(tokens.mean(0))
                layer.running_var.copy_(tokens.var(0, correction=0))
            else:
                layer.running_second_moment.copy_(tokens.square().mean(0))
        sums[1] += loss(other, batch)[0].detach() * number
        count += number
    return EvaluationGap(*(sums / count).tolist())


@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
def test_both_losses_equal_those_by_hand(norm: str) -> None:
    model, data = trained(norm), batches(4)
    found = evaluation_gap(model, data, loss)
    assert found is not None
    expected = by_hand(model, data)
    assert found.running_loss == pytest.approx(expected.running_loss, rel=1e-9)
    assert found.batch_loss == pytest.approx(expected.batch_loss, rel=1e-9)
    assert found.gap == pytest.approx(expected.running_loss - expected.batch_loss, rel=1e-6)
    assert abs(found.gap) > 1e-3


@pytest.mark.parametrize("norm", ["bn", "rbn", "pn", "mabn"])
def test_nothing_is_touched(norm: str) -> None:
    model = trained(norm)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    evaluation_gap(model, batches(2), loss)
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_losses_without_numbers_of_tokens_weigh_the_same() -> None:
    model, data = trained("bn"), batches(3)
    found = evaluation_gap(model, data, lambda m, b: float(m(*b).abs().mean()))
    assert found is not None
    model.eval()
    expected = sum(model(*batch).abs().mean().item() for batch in data) / 3
    assert found.running_loss == pytest.approx(expected)


def test_model_without_batch_statistics_has_no_gap() -> None:
    assert evaluation_gap(Masked("ln"), batches(2), loss) is None


def test_bad_arguments() -> None:
    model: Any = Masked("bn")
    with pytest.raises(InputError, match="only once"):
        evaluation_gap(model, iter(batches(2)), loss)
    with pytest.raises(InputError, match="hold nothing"):
        evaluation_gap(model, [], loss)
    with pytest.raises(InputError, match="loss is 3"):
        evaluation_gap(model, batches(1), 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="loss is None"):
        evaluation_gap(model, batches(1), None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="model is None"):
        evaluation_gap(None, batches(1), loss)  # type: ignore[arg-type]
