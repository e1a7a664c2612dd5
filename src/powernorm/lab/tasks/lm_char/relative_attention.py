"""Attention by content and by distance, over a segment and what was kept before it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.models.normed import HeadScale
from powernorm.lab.models.positions import sinusoidal_positions

BIAS_STD = 0.02
"""Of the initial u and v, as of all weights of the released code."""


class RelativeAttention(nn.Module):
    """Causal attention of Transformer-XL (Dai et al. 2019, section 3.3).

    The score of query i and key j in a head of size d is

    `[(q_i + u) · k_j + (q_i + v) · W_R r_{i-j}] / √d`,

    with learned u and v, which here belong to each layer, and the sinusoidal encoding r of the
    distance. No linear map has a bias.

    Args:
        num_features: size of the features, divisible by `num_heads`.
        num_heads: number of heads.
        dropout: of the attention weights, in training.
        scales_heads: whether each head has a learned scale, before the out-projection.

    Shape:
        - x: (batch, length, features)
        - context: (batch, memory + length, features), what was kept and then x
        - distances: (memory + length, features), encodings of the distances from the longest to 0
        - output: (batch, length, features)

    Raises:
        InputError: `num_heads` does not divide `num_features`.
    """

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        scales_heads: bool = False,
    ) -> None:
        super().__init__()
        if num_features % num_heads:
            raise InputError(
                f"num_heads={num_heads} does not divide num_features={num_features}: choose a "
                "divisor"
            )
        size = num_features // num_heads
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(num_features, num_features, bias=False)
        self.key_value = nn.Linear(num_features, 2 * num_features, bias=False)
        self.distance = nn.Linear(num_features, num_features, bias=False)
        self.output = nn.Linear(num_features, num_features, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, size))
        self.distance_bias = nn.Parameter(torch.zeros(num_heads, 1, size))
        self.head_scale = HeadScale(num_heads) if scales_heads else None

    def branch_weights(self) -> list[Tensor]:
        """Return the weights of values and output, for DeepNorm."""
        return [self.key_value.weight[self.key_value.in_features :], self.output.weight]

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw u and v."""
        for bias in (self.content_bias, self.distance_bias):
            nn.init.normal_(bias, std=BIAS_STD, generator=generator)

    def forward(self, x: Tensor, context: Tensor, distances: Tensor) -> Tensor:
        """Attend from every position of `x` to the positions of `context` up to it."""
        query = self._heads(self.query(x))
        keys, values = map(self._heads, self.key_value(context).chunk(2, dim=-1))
        encoded = self._heads(self.distance(distances)[None])
        scale = 1 / math.sqrt(query.shape[-1])
        by_distance = (query + self.distance_bias) @ encoded.transpose(-1, -2)
        later = _later_positions(x.shape[1], context.shape[1], x.device)
        bias = (shifted(by_distance) * scale).masked_fill(later, -math.inf)
        attended = F.scaled_dot_product_attention(
            query + self.content_bias,
            keys,
            values,
            attn_mask=bias,
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
        )
        side_by_side = attended.transpose(1, 2).flatten(2)
        if self.head_scale is not None:
            side_by_side = self.head_scale(side_by_side)
        mixed: Tensor = self.output(side_by_side)
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, features) → (batch, heads, length, features of a head)."""
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads.transpose(1, 2)


def shifted(by_distance: Tensor) -> Tensor:
    """Turn scores by distance into scores by key, without a loop (Dai et al. 2019, appendix B).

    Each query has its keys at other distances than its neighbor: row i moves by length - 1 - i
    to the left. One zero in front of each row, and the rows read with a length that is one less,
    do that; what comes in from the right belongs to later keys.

    Args:
        by_distance: (…, length, keys), the distance falls from keys - 1 to 0 along the last
            dimension.

    Returns:
        (…, length, keys), by the place of the key; entries of keys after the query mean nothing.

    >>> shifted(torch.tensor([[2, 1, 0], [5, 4, 3]]))
    tensor([[1, 0, 0],
            [5, 4, 3]])
    """
    length, keys = by_distance.shape[-2:]
    flat = F.pad(by_distance, (1, 0)).flatten(-2)
    rows: Tensor = flat[..., length:].unflatten(-1, (length, keys))
    return rows


def _later_positions(length: int, keys: int, device: torch.device) -> Tensor:
    """Return which keys stand after each query, bool, (length, keys); the last key is its own."""
    ones = torch.ones(length, keys, dtype=torch.bool, device=device)
    return ones.triu(diagonal=keys - length + 1)


def distance_encodings(
    keys: int, num_features: int, max_distance: int | None, device: torch.device
) -> Tensor:
    """Return the encodings of the distances keys - 1 … 0, (keys, features).

    Args:
        keys: number of distances.
        num_features: size of each encoding.
        max_distance: those beyond it are taken for it; None has no limit.
        device: of the result.
    """
    distances = torch.arange(keys - 1, -1, -1, device=device)
    if max_distance is not None:
        distances = distances.clamp(max=max_distance)
    return sinusoidal_positions(keys, num_features, device=device)[distances]
