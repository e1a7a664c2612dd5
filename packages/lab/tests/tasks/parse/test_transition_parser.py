"""The parser's network: both computations of its first layer, its norms, and what it learns."""

import torch
from lab.tests.tiny_models import STATES, states, transition_parser
from torch import nn

from powernorm_lab.tasks.parse.model import EmbeddedLinear


def test_training_and_evaluation_compute_the_same_map() -> None:
    layer = EmbeddedLinear(STATES, 6, 8).double()
    ids = states()
    # The definition of both: the concatenated embeddings times the matrix.
    columns = ids.split([5, 5, 3], dim=1)
    parts = [table(part) for table, part in zip(layer.tables, columns, strict=True)]
    expected = torch.cat([part.flatten(1) for part in parts], dim=1) @ layer.linear.weight.T
    expected = expected + layer.linear.bias
    cotangent = torch.randn_like(expected)
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(expected, parameters, cotangent)
    for mode in (True, False):
        found = layer.train(mode)(ids)
        torch.testing.assert_close(found, expected)
        for own, other in zip(
            torch.autograd.grad(found, parameters, cotangent), gradients, strict=True
        ):
            torch.testing.assert_close(own, other)


def test_every_layer_but_the_last_has_a_norm_before_the_activation() -> None:
    model = transition_parser("bn", num_layers=3)
    kinds = [[type(part).__name__ for part in layer.children()] for layer in model.layers]
    assert kinds == [
        ["EmbeddedLinear", "BatchNorm", "ReLU", "Dropout"],
        ["Linear", "BatchNorm", "ReLU", "Dropout"],
        ["Linear", "BatchNorm", "ReLU", "Dropout"],
    ]
    assert isinstance(model.head, nn.Linear)


def test_the_network_learns_a_rule() -> None:
    model = transition_parser()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(150):
        rows = states(64, seed=step)
        # The target is the first label, a rule of one column.
        loss = nn.functional.cross_entropy(model(rows), rows[:, 10])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rows = states(200, seed=1000)
    assert (model.eval()(rows).argmax(dim=1) == rows[:, 10]).float().mean() > 0.95
