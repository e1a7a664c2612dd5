"""The verbs that run a model on batches leave the batches as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm


@pytest.mark.parametrize("way", ["layer_by_layer", "one_pass"])
def test_a_model_that_writes_into_its_input(way: Any) -> None:
    class OfNans(nn.Module):
        """Padding is NaN in the data, and made 0."""

        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper = powernorm.BatchNorm(4), powernorm.BatchNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            padding = x.isnan().all(-1)
            x[padding] = 0
            return self.upper(self.lower(x, padding), padding)

    model, x = OfNans(), torch.randn(2, 5, 4) + 3
    x[1, 2:] = torch.nan
    before = x.clone()
    powernorm.calibrate(model, [x, x.clone()], way=way)
    torch.testing.assert_close(model.lower.running_mean, x[~x.isnan()].view(-1, 4).mean(0))
    assert float(model.upper.running_mean.abs().max()) < 1e-5
    torch.testing.assert_close(x, before, equal_nan=True)
