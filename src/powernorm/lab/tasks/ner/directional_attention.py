"""The attention of TENER (Yan et al. 2019), which knows direction and distance."""

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.models.attention import attended_positions
from powernorm.lab.models.dropout import Dropout
from powernorm.lab.models.normed import HeadScale


class DirectionalAttention(nn.Module):
    """Self-attention whose weights depend on how far, and on which side, a position lies.

    With the query Q_t, the value V_j and the key K_j, which is x_j itself cut into heads, position
    t attends to position j of a sentence by (eq. 10-13 of the paper)

    `A_tj = Q_t K_jᵀ + Q_t R_{t-j}ᵀ + u K_jᵀ + v R_{t-j}ᵀ`, `softmax_j(A_tj) V_j`

    without the usual division by √d, which would make the weights less sharp. R (`offset_codes`)
    is odd in its sines, so that left and right differ; u and v are learned for each head. As in
    the program of its authors the heads stand side by side, with no further map after them.

    Args:
        num_features: size of the features, divisible by `num_heads`.
        num_heads: number of heads.
        dropout: of the attention weights, in training.
        scales_heads: whether each head has a learned scale.

    Shape:
        - x: (batch, length, features)
        - padding_mask: (batch, length), True = padding, which nothing attends to
        - output: (batch, length, features)

    Raises:
        InputError: `num_heads` does not divide `num_features` into heads of an even size.
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
        if num_features % (2 * num_heads):
            raise InputError(
                f"num_heads={num_heads} does not divide num_features={num_features} into heads of "
                "an even size, of which half are sines and half cosines: choose another"
            )
        self.num_heads = num_heads
        self.head_features = num_features // num_heads
        self.query = nn.Linear(num_features, num_features, bias=False)
        self.value = nn.Linear(num_features, num_features, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_features))
        """u."""
        self.offset_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_features))
        """v."""
        self.dropout = Dropout(dropout)
        self.head_scale = HeadScale(num_heads) if scales_heads else None

    def branch_weights(self) -> list[Tensor]:
        """Return the weight of the values, for DeepNorm; there is no output map."""
        return [self.value.weight]

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw u and v, normal after Glorot and Bengio (2010), from a generator."""
        for bias in (self.content_bias, self.offset_bias):
            nn.init.xavier_normal_(bias.data.squeeze(1), generator=generator)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attend to all positions of `x` that are no padding."""
        query, keys, values = self._heads(self.query(x)), self._heads(x), self._heads(self.value(x))
        codes = offset_codes(x.shape[1], self.head_features, device=x.device).to(query.dtype)
        scores = (query + self.content_bias) @ keys.transpose(-1, -2)
        scores = scores + by_position((query + self.offset_bias) @ codes.T)
        if padding_mask is not None:
            scores = scores.masked_fill(~attended_positions(padding_mask), -torch.inf)
        attended: Tensor = self.dropout(scores.softmax(dim=-1)) @ values
        side_by_side = attended.transpose(1, 2).flatten(2)
        return side_by_side if self.head_scale is None else self.head_scale(side_by_side)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, features) → (batch, heads, length, features of a head)."""
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_features).transpose(1, 2)


def offset_codes(length: int, num_features: int, *, device: torch.device | None = None) -> Tensor:
    """Return R of all offsets t - j, from length - 1 down to 1 - length, in float32.

    Features i and i + C/2 of an offset are the sine and cosine of (t - j) / 10000^(2i / C), which
    is the paper's code but for the order of its features.

    Args:
        length: of a sentence.
        num_features: C, even.
        device: of the result.

    Returns:
        (2 · length - 1, num_features); row length - 1 + j - t is that of t - j.

    >>> offset_codes(2, 2)
    tensor([[ 0.8415,  0.5403],
            [ 0.0000,  1.0000],
            [-0.8415,  0.5403]])
    """
    offsets = torch.arange(length - 1, -length, -1, device=device, dtype=torch.float32)
    even = torch.arange(0, num_features, 2, device=device, dtype=torch.float32)
    angles = offsets[:, None] * 10000 ** (-even / num_features)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def by_position(scores: Tensor) -> Tensor:
    """Turn scores by offset into scores by position.

    Args:
        scores: (…, length, 2 · length - 1); column length - 1 + j - t of row t is for position j.

    Returns:
        (…, length, length).
    """
    length = scores.shape[-2]
    if length == 1:
        return scores
    # Row t begins t places earlier than the one before it: in rows that are one place shorter, all
    # begin at the same one.
    flat = scores.flatten(-2)[..., length - 1 : -1]
    return flat.reshape(*scores.shape[:-1], 2 * length - 2)[..., :length]
