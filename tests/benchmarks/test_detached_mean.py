"""The interventions of benchmarks/detached_mean.py, and its rules."""

import json

import pytest
import torch
from torch import Tensor, nn

import detached_mean as study
import powernorm


def _gradients(norm: nn.Module, change: str) -> dict[str, Tensor]:
    torch.manual_seed(0)

    def layer() -> study.HiddenLayer:
        linear = nn.Linear(6, 6)
        return study.HiddenLayer(linear, 6, lambda _: norm, activation="relu", dropout=0.0)

    model = nn.Sequential(layer(), layer()).double()
    lower = model[0].linear.weight, model[1].linear.weight
    study.intervene(model, change)
    model(torch.randn(5, 6, dtype=torch.float64)).square().sum().backward()
    return dict(zip(("lower", "upper"), (weight.grad for weight in lower), strict=True))


def test_interventions_remove_what_they_say() -> None:
    simple = _gradients(powernorm.LayerNorm(6, affine=False), "")
    detached = powernorm.DetachNorm(6, detach_mean=True, detach_std=False)
    plain, gradients, below = (_gradients(detached, c) for c in ("", "gradients", "below"))
    assert not torch.allclose(plain["upper"], simple["upper"])
    torch.testing.assert_close(gradients["upper"], simple["upper"])
    assert not torch.allclose(gradients["lower"], simple["lower"])
    # The gradient of the weights is the detached one, that of what lies below LayerNorm's.
    torch.testing.assert_close(below["upper"], plain["upper"])
    torch.testing.assert_close(study.without_mean(below["lower"], 0), simple["lower"])


@pytest.mark.parametrize(
    ("score", "word"),
    [
        (90.1, "explains it"),
        (87.0, "explains nothing"),
        (88.5, "explains a part"),
        (95.0, "open"),
    ],
)
def test_verdicts(score: float, word: str) -> None:
    scores = dict.fromkeys(study.ARMS, 87.1) | {"ln-simple": 90.0, "no bias": score}
    rows = [
        {"arm": arm, "seed": seed, "test_uas": value + 0.01 * (seed * index % 3)}
        for index, (arm, value) in enumerate(scores.items())
        for seed in study.SEEDS
    ]
    assert study.verdict(rows, "no bias") == word


def test_docs_have_the_table_of_the_stored_runs() -> None:
    rows = json.loads(study.RESULTS.read_text("utf-8"))
    assert study.TABLE.read_text("utf-8") == study.table(rows)
