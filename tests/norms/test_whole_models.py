"""Whole models as pickles: copied, and loaded by torch's restricted unpickler."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import powernorm


@pytest.mark.parametrize("name", powernorm.NORMS)
def test_copies_of_a_model_compute_the_same(name: str, tmp_path: Path) -> None:
    """In evaluation, and in the next training step, which counters and averages decide."""
    model = nn.Sequential(nn.Linear(8, 8), powernorm.build_norm(name, 8))
    for _ in range(2):
        model(torch.randn(4, 5, 8)).sum().backward()
    torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear]):
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    x = torch.randn(4, 5, 8)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded]
    for training in (False, True):
        expected = model.train(training)(x)
        for one in copies:
            assert torch.equal(one.train(training)(x), expected)
