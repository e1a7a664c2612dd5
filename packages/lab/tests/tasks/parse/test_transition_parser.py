"""The parser's network: both computations of its first layer, initialization, export, folding."""

from functools import partial

import pytest
import torch
from lab.tests.task_models import check_first_weights
from torch import Tensor, nn

from powernorm.norms import NORMS, BatchNorm, build_norm
from powernorm.surgery import fold
from powernorm_lab.tasks.parse.embedded_linear import EmbeddedLinear, IdColumns
from powernorm_lab.tasks.parse.model import TransitionParser

# Words outnumber the rows of a batch, tags and labels do not.
PLACES = [IdColumns(40, 5), IdColumns(7, 5), IdColumns(4, 3)]
NUM_TRANSITIONS = 9
ROWS = 16


def states(rows: int = ROWS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(n, (rows, number), generator=generator) for n, number in PLACES]
    return torch.cat(columns, dim=1)


def build(
    norm: str, *, seed: int = 0, dropout: float = 0.0, num_layers: int = 2
) -> TransitionParser:
    return TransitionParser(
        PLACES,
        NUM_TRANSITIONS,
        partial(build_norm, norm),
        num_features=8,
        num_layers=num_layers,
        embedding_features=6,
        dropout=dropout,
        seed=seed,
    )


def test_training_and_evaluation_compute_the_same_map() -> None:
    layer = EmbeddedLinear(PLACES, 6, 8).double()
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


@pytest.mark.parametrize("norm", NORMS)
def test_all_norms_start_from_the_same_weights(norm: str) -> None:
    check_first_weights(build, norm, 3 + 2 + 2 + 2)


@pytest.mark.parametrize("norm", NORMS)
def test_in_evaluation_a_state_has_its_own_scores(norm: str) -> None:
    model = build(norm, dropout=0.2)
    model(states())
    model.eval()
    whole = model(states(seed=1))
    assert whole.shape == (ROWS, NUM_TRANSITIONS)
    alone = torch.cat([model(row[None]) for row in states(seed=1)])
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.head(model.features(states(seed=1))), whole)


def test_every_layer_but_the_last_has_a_norm_before_the_activation() -> None:
    model = build("bn", num_layers=3)
    kinds = [[type(part).__name__ for part in layer.children()] for layer in model.layers]
    assert kinds == [
        ["EmbeddedLinear", "BatchNorm", "ReLU", "Dropout"],
        ["Linear", "BatchNorm", "ReLU", "Dropout"],
        ["Linear", "BatchNorm", "ReLU", "Dropout"],
    ]
    assert isinstance(model.head, nn.Linear)


def test_norms_with_running_statistics_fold_into_the_weights() -> None:
    model = build("bn", dropout=0.2)
    for seed in range(5):
        model(states(seed=seed))
    model.eval()
    expected = model(states(seed=9))
    report = fold(model, (states(),))
    assert [row.action for row in report.rows] == ["fold", "fold"]
    assert not any(isinstance(module, BatchNorm) for module in model.modules())
    torch.testing.assert_close(model(states(seed=9)), expected, atol=1e-5, rtol=1e-4)


def test_the_network_learns_a_rule() -> None:
    model = build("ln")
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
