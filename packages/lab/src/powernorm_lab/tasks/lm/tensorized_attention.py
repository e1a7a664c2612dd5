"""The attention of the Tensorized Transformer with one core (Ma et al. 2019)."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.positions import sinusoidal_positions

NUM_BLOCKS: Final = 4
"""Number of parts of a segment that are computed one after the other. A part skips the columns
after its end, so that 4 parts take 15/32 of the whole tensor's work and memory; more parts are
hardly faster."""
_BIAS_STD: Final = 0.02


class TensorizedAttention(nn.Module):
    """Attention whose weights are a tensor with three indices (core-1 of Ma et al. 2019).

    For token i of a segment

        T_ijk = Σ_r g_r [ (q_i + u)_r k_jr + (q_i + v)_r p_{i-j,r} ] v_kr

    with T_ijk = 0 for j > i or k > i. `output`, Linear(L² → C) without bias, maps the flattened
    L × L slice of the token. One linear map of the input without bias computes q, k and v; u and v
    (`content_bias`, `position_bias`) and g (`core_weight`) are learned. The published code of this
    model builds a causal mask and never applies it; `sees_future` does the same.

    Details that the papers do not specify are as in Transformer-XL, on which the model is based: p
    is a linear map without bias of the sinusoidal encoding of the distance i - j, with as many
    features as the input; u and v are initialized by normal noise with standard deviation 0.02, g
    by the softmax of normal noise. There is no dropout inside.

    A segment shorter than L uses the first columns, and the others are 0, so that its outputs equal
    those of the same tokens at the beginning of a whole segment.

    The whole tensor is never stored: the rows of a segment are computed in `NUM_BLOCKS` parts, each
    with the columns up to its end. Mapping the flattened slice takes 2 L² C operations for a token.
    Applying the map to the factors of the slice, which has rank R, before multiplying them would
    take 4 L R C: fewer only for R < L / 2, and without skipping later columns.

    Args:
        num_features: C, number of features.
        head_features: R.
        max_length: L.
        sees_future: whether to omit the causal mask.

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
        """Draw u, v and g."""
        self.content_bias.normal_(std=_BIAS_STD, generator=generator)
        self.position_bias.normal_(std=_BIAS_STD, generator=generator)
        noise = torch.empty_like(self.core_weight).normal_(generator=generator)
        self.core_weight.copy_(noise.softmax(0))

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the output of each position, from the pairs of positions that it attends to.

        The padding mask is not used: padding is at the end, and no token attends to a later one.

        Raises:
            InputError: there is a mask and no causal mask.
        """
        if padding_mask is not None and self.sees_future:
            raise InputError(
                "a tensorized attention that sees the future would see the padding, too: leave out "
                "the padding mask or sees_future"
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
        """Return p for the distances 1 - length … length - 1, (2 length - 1, R)."""
        num_features = self.position.in_features
        encodings = sinusoidal_positions(
            2 * length - 1, num_features, first=1 - length, device=x.device
        )
        distances: Tensor = self.position(encodings.to(self.position.weight.dtype))
        return distances

    def _columns(self, seen: int) -> Tensor:
        """Return the weights of `output` for the pairs of the first columns, (C, seen²)."""
        columns = self.output.weight.view(-1, self.max_length, self.max_length)
        return columns[:, :seen, :seen].flatten(1)
