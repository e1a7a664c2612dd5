from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diagnosis.models import BATCH_STATISTICS_NORMS, Batch, Masked, batches, inputs_of
from powernorm.diagnosis import EvaluationGap, evaluation_gap
from powernorm.diagnosis.evaluation import closed_share, evaluate_statistics, mean_loss
from powernorm.errors import InputError
from powernorm.norms import build_norm
from refusals import refuses


def regression(norm: str) -> tuple[nn.Sequential, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(build_norm(norm, 4), nn.Linear(4, 1))
    data = [3 * torch.randn(32, 4) + 5 for _ in range(6)]
    return model.train(), data


def squared_loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return F.mse_loss(model(x), torch.zeros(len(x), 1)), len(x)


@pytest.mark.parametrize("norm", ["bn", "rbn", "pnv", "pn", "mabn"])
def test_rows_are_the_losses_and_nothing_changes(norm: str) -> None:
    model, data = regression(norm)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    rows = evaluate_statistics(model, squared_loss, data[:4], data[4:], by_batch={32: data[4:]})
    names = ["running", "re-estimated", "re-estimated in one pass", "batch"]
    assert [row["statistics"] for row in rows] == names
    assert [row["tokens"] for row in rows] == [None, None, None, 32]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    model.eval()
    with torch.no_grad():
        expected = torch.stack([squared_loss(model, x)[0] for x in data[4:]]).mean()
    assert rows[0]["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_batch_norm_by_hand() -> None:
    """Untrained running statistics are far off; the population's and the batch's are not."""
    model, data = regression("bn")
    found = evaluate_statistics(model, squared_loss, data, data)
    rows = {row["statistics"]: row["loss"] for row in found}
    linear = model[1]
    tokens = torch.cat(data)
    mean, std = tokens.mean(0), (tokens.var(0) + 1e-5).sqrt()
    with torch.no_grad():
        population = linear((tokens - mean) / std).square().mean().item()
        own = [
            linear((x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()).square().mean()
            for x in data
        ]
    assert rows["re-estimated"] == pytest.approx(population, rel=1e-4)
    assert rows["batch"] == pytest.approx(torch.stack(own).mean().item(), rel=1e-4)
    assert rows["running"] > 2 * rows["re-estimated"]


@pytest.mark.parametrize("norm", ["pn-only", "mabn", "brn"])
def test_batch_rows_are_by_the_batch_also_after_the_warm_up(norm: str) -> None:
    """These normalize by running statistics in training; here by those of the batch."""
    warm = {"mabn": {"ratio_start": 0, "window": 2}, "brn": {"ramp_steps": 1}}
    torch.manual_seed(0)
    layer = build_norm(norm, 4, warmup_steps=0, **warm.get(norm, {}))
    model = nn.Sequential(layer, nn.Linear(4, 1))
    data = [scale * torch.randn(32, 4) for scale in (1.0, 10.0)]
    found = evaluate_statistics(model, squared_loss, data, data)
    rows = {row["statistics"]: row["loss"] for row in found}
    own = []
    for x in data:
        mean = x.mean(0) if layer.centered else 0.0
        centered = x - mean
        root = (centered.square().mean(0) + layer.eps).sqrt()
        own.append(model[1](centered / root).square().mean().detach())
    assert rows["batch"] == pytest.approx(torch.stack(own).mean().item(), rel=1e-4)


def row(statistics: str, value: float) -> Any:
    return {"statistics": statistics, "tokens": None, "loss": value}


def test_closed_share() -> None:
    rows = [row("running", 5.0), row("re-estimated", 4.0), row("batch", 3.0)]
    assert closed_share(rows) == 0.5
    assert closed_share([row("running", 3.0), row("re-estimated", 3.0), row("batch", 3.5)]) is None
    assert closed_share(rows[:2]) is None
    # No quotients of noise, and none of what is not finite.
    close = [row("running", 5.0), row("re-estimated", 4.0), row("batch", 4.9999)]
    assert closed_share(close) is None
    assert closed_share([row("running", float("inf")), *rows[1:]]) is None


def test_tokens_weigh() -> None:
    model = nn.Identity()
    data = [torch.zeros(1), torch.ones(3)]
    assert mean_loss(model, data, lambda _, x: (x.mean(), len(x))) == 0.75
    assert mean_loss(model, data, lambda _, x: x.mean()) == 0.5


def test_bad_arguments_of_evaluate_statistics() -> None:
    model, data = regression("bn")
    with pytest.raises(InputError, match="no layer with batch statistics"):
        evaluate_statistics(nn.LayerNorm(4), squared_loss, data, data)
    refuses("only once", evaluate_statistics, model, squared_loss, data, iter(data))
    refuses("loss is 3", evaluate_statistics, model, 3, data, data)
    refuses("by_batch is 3", evaluate_statistics, model, squared_loss, data, data, by_batch=3)
    with pytest.raises(InputError, match="only once"):
        evaluate_statistics(model, squared_loss, data, data, by_batch={32: iter(data)})
    refuses("are empty", evaluate_statistics, model, squared_loss, data, [])


def absolute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
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
        value, number = absolute_loss(model, batch)
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
        sums[1] += absolute_loss(other, batch)[0].detach() * number
        count += number
    return EvaluationGap(*(sums / count).tolist())


@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
def test_both_losses_equal_those_by_hand(norm: str) -> None:
    model, data = trained(norm), batches(4)
    found = evaluation_gap(model, data, absolute_loss)
    assert found is not None
    expected = by_hand(model, data)
    assert found.running_loss == pytest.approx(expected.running_loss, rel=1e-9)
    assert found.batch_loss == pytest.approx(expected.batch_loss, rel=1e-9)
    assert found.gap == pytest.approx(expected.running_loss - expected.batch_loss, rel=1e-6)
    assert abs(found.gap) > 1e-3


def test_losses_without_numbers_of_tokens_weigh_the_same() -> None:
    model, data = trained("bn"), batches(3)
    found = evaluation_gap(model, data, lambda m, b: float(m(*b).abs().mean()))
    assert found is not None
    model.eval()
    expected = sum(model(*batch).abs().mean().item() for batch in data) / 3
    assert found.running_loss == pytest.approx(expected)


def test_model_without_batch_statistics_has_no_gap() -> None:
    assert evaluation_gap(Masked("ln"), batches(2), absolute_loss) is None


def test_bad_arguments_of_evaluation_gap() -> None:
    model: Any = Masked("bn")
    refuses("only once", evaluation_gap, model, iter(batches(2)), absolute_loss)
    refuses("are empty", evaluation_gap, model, [], absolute_loss)
    refuses("loss is 3", evaluation_gap, model, batches(1), 3)
    refuses("loss is None", evaluation_gap, model, batches(1), None)
    refuses("model is None", evaluation_gap, None, batches(1), absolute_loss)
