import math

import pytest
import torch
from torch import nn

from powernorm.diagnosis.outliers import PositionEnergy, TokenShares, loud_features


def test_loud_features() -> None:
    found = loud_features(torch.tensor([1.0, 1.0, 49.0, 100.0, 1.0]))
    assert (found["num_outliers"], found["outlier_feature"]) == (2, 3)
    assert found["outlier_ratio"] == pytest.approx(10)


def test_silent_features() -> None:
    assert loud_features(torch.zeros(4))["num_outliers"] == 0
    found = loud_features(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert found["outlier_ratio"] == math.inf


def test_the_first_valid_token_counts_as_the_first() -> None:
    """Left padding shifts positions; what is padded has no energy."""
    x = torch.ones(2, 5, 3)
    mask = torch.tensor([[True, True, False, False, False], [False] * 5])
    x[0, :2] = 1e6
    x[0, 2] = 10
    x[1, 0] = 10
    energy = PositionEnergy()
    energy.add(x, mask)
    found = energy.cells()
    assert found == {"top_position": 0, "top_position_ratio": pytest.approx(100)}


def test_batches_of_other_lengths_add_up() -> None:
    energy = PositionEnergy()
    energy.add(torch.ones(1, 2, 4), None)
    energy.add(torch.cat([torch.ones(3, 3, 4), 4 * torch.ones(3, 1, 4)], dim=1), None)
    assert energy.cells() == {"top_position": 3, "top_position_ratio": 16.0}


def test_no_sequences() -> None:
    energy = PositionEnergy()
    energy.add(torch.ones(4, 3), None)
    assert energy.cells() == {}


def test_a_residual_sink_is_the_feature_above_100_medians_in_most_tokens() -> None:
    """By hand: of six tokens four have the sink, one has another large feature."""
    tokens = torch.tensor([[1.0, -1, 1, 1, 1]]).repeat(6, 1)
    tokens[:4, 2] = -101.0
    tokens[4, 0] = 101.0
    tokens[5, 2] = 99.0
    shares = TokenShares(nn.LayerNorm(5))
    shares.add(tokens[:3])
    shares.add(tokens[3:])
    found = shares.cells()
    assert (found["sink_feature"], found["sink_share"]) == (2, 4 / 6)
    assert not {"saturated_share", "slope"} & found.keys()
