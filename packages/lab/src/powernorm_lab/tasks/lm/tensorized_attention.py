"""The attention of the Tensorized Transformer with one core (Ma et al. 2019)."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.positions import sinusoidal_positions

NUM_BLOCKS: Final = 4
"""Parts of a segment that are computed one after the other. Each looks at no column behind its
end, so that 4 of them take 15/32 of the tensor's work and memory; more are hardly faster."""
_BIAS_STD: Final = 0.02


class TensorizedAttention(nn.Module):
    """Attention whose weights are a tensor of three indices (core-1 of Ma et al. 2019).

    For token i of a segment

        T_ijk = Σ_r g_r [ (q_i + u)_r k_jr + (q_i + v)_r p_{i-j,r} ] v_kr

    with T_ijk = 0 where j > i or k > i; the L × L slice of the token, flattened, goes through
    `output`, Linear(L² → C) without bias. q, k and v come from one linear map of the input without
    bias, u and v (`content_bias`, `position_bias`) and g (`core_weight`) are learned. The published
    code of this model makes a causal mask and never applies it; `sees_future` does the same.

    What the papers leave open, as in the Transformer-XL that the model descends from: p is a linear
    map without bias of the sinusoidal encoding of the distance i - j, of as many features as the
    input; u and v begin as normal noise of deviation 0.02, g as the softmax of normal noise. There
    is no dropout inside.

    A segment shorter than L has its columns where it would have them at the beginning of a whole
    one, and the others are 0; so the outputs of a beginning are those of the whole segment.

    The tensor is never whole: rows of the segment go in `NUM_BLOCKS` parts, and each part has the
    columns up to its end. To map the flattened slice costs 2 L² C operations a token. To apply the
    map to the factors of the slice, which has rank R, before they are multiplied costs 4 L R C:
    less for R < L / 2 only, and with no later column left out.

    Args:
        num_features: C, size of the features.
        head_features: R.
        max_length: L.
        sees_future: whether the mask is left out.

    Shape:
        - x: (batch, length, C) with length ≤ L
        - output: the same
    """

    def __init__(
        self,
        num_features: int,
        head_features: int,
        max_length: int,
        *,
        sees_future: bool = False,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.sees_future = sees_future
        self.query_key_value = nn.Linear(num_features, 3 * head_features, bias=False)
        self.position = nn.Linear(num_features, head_features, bias=False)
        self.output = nn.Linear(max_length**2, num_features, bias=False)
        self.content_bias = nn.Parameter(torch.empty(head_features))
        self.position_bias = nn.Parameter(torch.empty(head_features))
        self.core_weight = nn.Parameter(torch.empty(head_features))
        self.draw_weights(torch.Generator().manual_seed(0))

    def branch_weights(self) -> list[Tensor]:
        """Return the weights of values and output, for DeepNorm."""
        num_others = 2 * len(self.core_weight)
        return [self.query_key_value.weight[num_others:], self.output.weight]

    @torch.no_grad()
    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw u, v and g anew."""
        self.content_bias.normal_(std=_BIAS_STD, generator=generator)
        self.position_bias.normal_(std=_BIAS_STD, generator=generator)
        noise = torch.empty_like(self.core_weight).normal_(generator=generator)
        self.core_weight.copy_(noise.softmax(0))

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return what each position makes of the pairs of positions that it sees.

        No mask of padding is needed: padding is at the end, and no token sees a later one.

        Raises:
            InputError: there is a mask, and the attention sees what is later.
        """
        if padding_mask is not None and self.sees_future:
            raise InputError(
                "a tensorized attention that sees the future would see the padding too: leave the "
                "padding mask out, or sees_future"
            )
        length = x.shape[1]
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        content = (query + self.content_bias) * self.core_weight
        relative = (query + self.position_bias) * self.core_weight
        distances = self._distances(length, x)
        size = max(1, -(-length // NUM_BLOCKS))
        parts = []
        for first in range(0, length, size):
            end = min(first + size, length)
            seen = length if self.sees_future else end
            rows = torch.arange(first, end, device=x.device)[:, None]
            columns = torch.arange(seen, device=x.device)
            # g_r [(q_i + u)_r k_jr + (q_i + v)_r p_{i-j,r}], (batch, rows, columns, R)
            pairs = torch.addcmul(
                content[:, first:end, None] * key[:, None, :seen],
                relative[:, first:end, None],
                F.embedding(rows - columns + length - 1, distances),
            )
            slices = pairs.flatten(1, 2) @ value[:, :seen].transpose(1, 2)
            slices = slices.unflatten(1, (end - first, seen))
            if not self.sees_future:
                later = columns > rows
                slices = slices.masked_fill(later[:, :, None] | later[:, None, :], 0.0)
            parts.append(F.linear(slices.flatten(2), self._columns(seen)))
        return torch.cat(parts, dim=1)

    def _distances(self, length: int, x: Tensor) -> Tensor:
        """Return p of the distances 1 - length … length - 1, (2 length - 1, R)."""
        num_features = self.position.in_features
        encodings = sinusoidal_positions(
            2 * length - 1, num_features, first=1 - length, device=x.device
        )
        distances: Tensor = self.position(encodings.to(self.position.weight.dtype))
        return distances

    def _columns(self, seen: int) -> Tensor:
        """Return the weights of `output` at the pairs of the first columns, (C, seen²)."""
        columns = self.output.weight.view(-1, self.max_length, self.max_length)
        return columns[:, :seen, :seen].flatten(1)
