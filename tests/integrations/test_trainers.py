"""Each process adds its share of the penalty: gradients averaged over processes see it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from regularized_models import Batch, Classifier, batches, cross_entropy_sum
from torch import Tensor, nn

import powernorm
from norms.processes import run_processes
from powernorm.errors import InputError
from powernorm.integrations.trainers import count_labels, log_entries, process_penalty
from powernorm.norms import RegularizedBatchNorm, build_norm
from refusals import refuses


def data() -> list[Batch]:
    """A batch for each of two processes, of equally many labels."""
    made = batches(3)
    return [made[0], made[2]]


def losses(model: Classifier, batch: Batch) -> tuple[Tensor, Tensor]:
    """(token sum, number of tokens)"""
    logits = model.logits(batch["x"], batch["labels"] == -100)
    return cross_entropy_sum(logits, batch["labels"]), count_labels(batch["labels"])


def averaged_gradients(rank: int) -> dict[str, list[Tensor]]:
    result = {}
    for reduction in ("mean", "token_sum"):
        model = Classifier()
        loss, tokens = losses(model, data()[rank])
        if reduction == "mean":
            loss, added = loss / tokens, process_penalty(model, "mean", tokens)
        else:
            added = process_penalty(model, "token_sum", None)
        assert added is not None
        (loss + added).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        result[reduction] = [parameter.grad for parameter in model.parameters()]
    return result


@pytest.mark.distributed
def test_two_processes_equal_one(tmp_path: Path) -> None:
    ranks = run_processes(averaged_gradients, 2, tmp_path)
    whole = {key: torch.cat([batch[key] for batch in data()]) for key in ("x", "labels")}
    for reduction in ("mean", "token_sum"):
        model = Classifier()
        loss, tokens = losses(model, whole)
        (loss + powernorm.penalty(model, "token_sum")).backward()
        for rank in ranks:
            for found, parameter in zip(rank[reduction], model.parameters(), strict=True):
                # Averaging makes (sum + penalty)/2 of a loss that is a sum on each process.
                scale = tokens if reduction == "mean" else 2
                torch.testing.assert_close(found * scale, parameter.grad, rtol=1e-9, atol=1e-9)


def share_of_one(rank: int) -> float:
    """Return the share for a loss of a single token in all, of which each process has a half."""
    model = Classifier()
    losses(model, data()[rank])
    added = process_penalty(model, "mean", torch.tensor(0.5))
    assert added is not None
    return added.item() - powernorm.penalty(model, "token_sum").item()


@pytest.mark.distributed
def test_a_share_below_one_token(tmp_path: Path) -> None:
    assert run_processes(share_of_one, 2, tmp_path) == [0, 0]


def unsynchronized(rank: int) -> float:
    model = Classifier()
    model.lower.sync = model.upper.sync = False
    losses(model, data()[rank])
    added = process_penalty(model, "mean", 7)
    assert added is not None
    return added.item() - powernorm.penalty(model, "mean", 7).item()


@pytest.mark.distributed
def test_statistics_of_its_own_have_a_penalty_of_their_own(tmp_path: Path) -> None:
    assert run_processes(unsynchronized, 2, tmp_path) == [0, 0]


def mixed(rank: int) -> str:
    model = Classifier()
    model.lower.sync = False
    losses(model, data()[rank])
    with pytest.raises(InputError) as error:
        process_penalty(model, "mean", 7)
    return str(error.value)


@pytest.mark.distributed
def test_several_groups_are_refused(tmp_path: Path) -> None:
    assert all("several process groups" in text for text in run_processes(mixed, 2, tmp_path))


@pytest.mark.parametrize("reduction", ["mean", "token_sum"])
def test_nothing_to_add(reduction: Any) -> None:
    assert process_penalty(nn.Sequential(build_norm("bn", 4)), reduction, 3) is None
    assert process_penalty(nn.Sequential(build_norm("rbn", 4)).eval(), reduction, 3) is None


def test_mean_without_tokens() -> None:
    model = Classifier()
    losses(model, data()[0])
    refuses("needs num_tokens", process_penalty, model, "mean", None)


@pytest.mark.parametrize("count", [0, -3, True, "many", float("inf")])
def test_numbers_of_tokens_that_are_none(count: Any) -> None:
    """As a tensor they would count as one token in silence."""
    model = Classifier()
    losses(model, data()[0])
    with pytest.raises(InputError, match=f"num_tokens is {count!r}, expected a number of at"):
        process_penalty(model, "mean", count)


def trained_without_asking(layer: nn.Module, updates: int, below: nn.Module | None = None) -> None:
    """A loop, or a trainer, that knows nothing of penalties."""
    model = nn.Sequential(nn.Linear(4, 4) if below is None else below, layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    for _ in range(updates):
        optimizer.zero_grad()
        with powernorm.training_step(model):
            for _ in range(2):
                x = torch.randn(5, 4, requires_grad=True)
                model(x).square().mean().backward()
        optimizer.step()


@pytest.fixture
def has_not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegularizedBatchNorm, "_has_warned", False)


@pytest.mark.usefixtures("has_not_warned")
def test_warns_once_where_nobody_asks_for_the_penalty() -> None:
    trained_without_asking(RegularizedBatchNorm(4), 49)
    with pytest.warns(UserWarning, match=r"100 backwards .*penalty, .* mean_penalty and var_"):
        trained_without_asking(RegularizedBatchNorm(4), 50)
    trained_without_asking(RegularizedBatchNorm(4), 60)


@pytest.mark.usefixtures("has_not_warned")
def test_does_not_warn_where_no_penalty_is_missed() -> None:
    trained_without_asking(RegularizedBatchNorm(4, mean_penalty=0.0, var_penalty=0.0), 60)
    asked = RegularizedBatchNorm(4)
    (asked(torch.randn(5, 4)).sum() + asked.penalty()).backward()
    trained_without_asking(asked, 60)
    frozen = RegularizedBatchNorm(4)
    frozen.freeze_statistics()
    trained_without_asking(frozen, 60)
    # As tests and benchmarks do, which go backward to their own input.
    trained_without_asking(RegularizedBatchNorm(4), 60, below=nn.Identity())


def test_log_entries() -> None:
    row = {"step": 3, "layer": "a.b", "norm": "pn", "mean_tid": None, "var_tid": 0.5}
    broken = {"gradient_norm": float("inf"), "mean_distance": float("nan"), "nonfinite_input": 1}
    found = log_entries([{**row, **broken}])
    assert found == {"norm/a.b/var_tid": 0.5, "norm/a.b/nonfinite_input": 1.0}
