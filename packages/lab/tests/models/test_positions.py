import math

import pytest
import torch

from powernorm_lab.models.positions import sinusoidal_positions


@pytest.mark.parametrize("num_features", [1, 6, 7])
def test_positions_follow_their_equation(num_features: int) -> None:
    expected = [
        [
            (math.cos if feature % 2 else math.sin)(
                position / 10000 ** ((feature - feature % 2) / num_features)
            )
            for feature in range(num_features)
        ]
        for position in range(9)
    ]
    torch.testing.assert_close(sinusoidal_positions(9, num_features), torch.tensor(expected))


def test_there_is_no_longest_sequence_and_the_longer_begins_as_the_shorter() -> None:
    long = sinusoidal_positions(5000, 8)
    assert torch.equal(long[:7], sinusoidal_positions(7, 8))
    assert len(long.unique(dim=0)) == 5000
    assert sinusoidal_positions(0, 8).shape == (0, 8)
