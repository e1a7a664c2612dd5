"""Sinusoidal encodings of positions."""

import torch
from torch import Tensor


def sinusoidal_positions(
    length: int, num_features: int, *, first: int = 0, device: torch.device | None = None
) -> Tensor:
    """Return the encodings of `length` positions from `first`, (length, num_features) in float32.

    Features 2i and 2i + 1 of position p are the sine and cosine of p / 10000^(2i / C) (Vaswani et
    al. 2017, section 3.5). They are computed at each call, which is cheap compared with a layer, so
    that the length is unlimited and nothing is stored. For relative positions, a negative position
    is the distance to a later token.

    >>> sinusoidal_positions(2, 2)
    tensor([[0.0000, 1.0000],
            [0.8415, 0.5403]])
    """
    even = torch.arange(0, num_features, 2, device=device, dtype=torch.float32)
    frequencies = 10000 ** (-even / num_features)
    positions = torch.arange(first, first + length, device=device, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :num_features]
