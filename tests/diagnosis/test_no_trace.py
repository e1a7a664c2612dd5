"""No function of the diagnosis changes weights, buffers, modes, hooks, random numbers or settings.

Neither after an exception in the middle of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from diagnosis.models import BATCH_STATISTICS_NORMS, Masked, batches
from powernorm.diagnosis import (
    evaluate_statistics,
    evaluation_gap,
    first_nonfinite,
    padding_check,
    training_inference_discrepancy,
)


class Failing(Masked):
    """Draws random numbers, and may fail after its norms have run."""

    fails = False

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        torch.rand(3)
        y = super().forward(x, padding_mask)
        if self.fails:
            raise RuntimeError("in the middle")
        return y


def loss(model: nn.Module, batch: Any) -> float:
    return float(model(*batch).abs().mean().detach())


FUNCTIONS: dict[str, Callable[[nn.Module, Any], object]] = {
    "diagnose": powernorm.diagnose,
    "discrepancy": training_inference_discrepancy,
    "gap": lambda model, data: evaluation_gap(model, data, loss),
    "statistics": lambda model, data: evaluate_statistics(model, loss, data, data),
    "nonfinite": lambda model, data: first_nonfinite(model, data[1]),
    "padding": lambda model, data: padding_check(model, data[1]),
}
CASES = [
    *((name, norm) for name in FUNCTIONS for norm in BATCH_STATISTICS_NORMS),
    *((name, "ln") for name in ("diagnose", "nonfinite", "padding")),
]


@pytest.mark.thinned
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_leaves_no_trace(name: str, norm: str, fails: bool) -> None:
    torch.manual_seed(0)
    model = Failing(norm).float()
    data = [(x.float(), mask) for x, mask in batches()]
    for batch in data[:2]:
        model(*batch).square().sum().backward()
    model.fails = fails
    model.dropout.eval()
    model.upper.eval()
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held, random = dict(model.named_buffers()), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="in the middle") if fails else nullcontext():
        FUNCTIONS[name](model, data)
    after = model.state_dict()
    assert state.keys() == after.keys()
    assert [name for name in state if not torch.equal(state[name], after[name])] == []
    assert all(buffer is held[name] for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in model.modules())
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
