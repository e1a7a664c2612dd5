"""The language model with tensorized attention; `test_every_model` has what all models share."""

import pytest
import torch
from lab.tests.tiny_models import LENGTH, VOCABULARY, tensorized_model, tokens, trained

from powernorm_lab.tasks.lm.model import TensorizedAttention


@pytest.mark.parametrize("norm", ["ln", "bn", "pn", "none"])
@torch.no_grad()
def test_published_behavior_does_see_later_tokens(norm: str) -> None:
    with torch.enable_grad():
        model = tensorized_model(norm, sees_future=True)
        trained(model, lambda seed: {"tokens": tokens(seed=seed)}, rate=0.03)
    x = tokens()
    changed = x.clone()
    changed[:, -1] = changed[:, -1] % (VOCABULARY - 1) + 1
    assert ((model(changed) - model(x)).abs().amax((0, 2)) > 0).all()


def test_layers_differ_in_every_weight() -> None:
    first, second = (layer.attention for layer in tensorized_model().layers)
    assert isinstance(first, TensorizedAttention)
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert not torch.equal(ours, theirs)


@torch.no_grad()
def test_positions_are_known_by_their_distances_alone() -> None:
    model = tensorized_model().eval()
    assert model.positions is None
    same = model(torch.zeros(1, LENGTH, dtype=torch.long))
    # The first of equal tokens attends only to itself, the others to more of the same.
    assert not torch.allclose(same[:, 0], same[:, 1])
