"""Checks that the models of all tasks share."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def check_first_weights(
    build: Callable[..., nn.Module], norm: str, number: int
) -> dict[str, Tensor]:
    """Check that initial weights are equal for all norms and differ between seeds.

    Args:
        build: function that builds a model by norm and `seed`.
        norm: short name of the norm to compare with `ln`.
        number: number of parameters outside the norms.

    Returns:
        These parameters by name; those that are not drawn are 0.
    """
    torch.manual_seed(len(norm))  # earlier random numbers must not matter
    weights, reference, other = (
        _outside_norms(build(name, seed=seed)) for name, seed in ((norm, 5), ("ln", 5), (norm, 6))
    )
    assert weights.keys() == reference.keys() == other.keys()
    assert len(weights) == number
    for name, weight in weights.items():
        assert torch.equal(weight, reference[name]), name
        assert not torch.equal(weight, other[name]) or not weight.any(), name
        assert weight.any() or "bias" in name, name
    return weights


def _outside_norms(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "norm" not in name}


def learned(model: Model, tokens: Callable[..., Tensor], rate: float = 0.1) -> Model:
    """Train for three steps, so that weights and running statistics differ from the initial ones.

    Args:
        model: model with token logits; it is in evaluation mode afterwards.
        tokens: function that makes a batch by `seed`.
        rate: learning rate.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(3):
        x = tokens(seed=step)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def check_causal(predict: Callable[[Tensor], Tensor], tokens: Tensor, vocabulary: int) -> None:
    """Check that a token changes outputs from its position on, and none before it."""
    expected = predict(tokens)
    for position in range(tokens.shape[1]):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % vocabulary
        got = predict(changed)
        assert torch.equal(got[:, :position], expected[:, :position])
        assert not torch.allclose(got[:, position:], expected[:, position:])
