"""Multi-head attention on torch's scaled-dot-product kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError


def attended_positions(padding_mask: Tensor) -> Tensor:
    """Return where attention over a padded memory may look, True = yes, (batch, 1, 1, length).

    A row of nothing but padding sees all of it: a softmax over nothing is NaN.
    """
    allowed = ~padding_mask[:, None, None, :]
    return allowed | ~allowed.any(dim=-1, keepdim=True)


class MultiHeadAttention(nn.Module):
    """Attention of every position over a sequence, its own or another's.

    Args:
        num_features: size of the features, divisible by `num_heads`.
        num_heads: number of heads.
        dropout: of the attention weights, in training.
        causal: a position attends to itself and earlier ones only (self-attention).

    Shape:
        - x: (batch, length, features)
        - memory: (batch, memory length, features)
        - padding_mask: (batch, memory length), or (batch, length) without a memory
        - output: (batch, length, features)

    Raises:
        InputError: `num_heads` does not divide `num_features`.
    """

    def __init__(
        self, num_features: int, num_heads: int, *, dropout: float = 0.0, causal: bool = False
    ) -> None:
        super().__init__()
        if num_features % num_heads:
            raise InputError(
                f"num_heads={num_heads} does not divide num_features={num_features}: choose a "
                "divisor."
            )
        self.num_heads = num_heads
        self.dropout = dropout
        self.causal = causal
        self.query = nn.Linear(num_features, num_features)
        self.key_value = nn.Linear(num_features, 2 * num_features)
        self.output = nn.Linear(num_features, num_features)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attend from `x` to `memory` (to `x` itself where there is none), but not to padding."""
        query = self._heads(self.query(x))
        keys, values = self.keys_values(x if memory is None else memory)
        allowed = None if padding_mask is None else self._allowed(padding_mask)
        causal = self.causal and padding_mask is None
        return self._attended(query, keys, values, allowed, causal=causal)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `attend` looks at, each (batch, heads, memory length, features of a head)."""
        keys, values = self.key_value(memory).chunk(2, dim=-1)
        return self._heads(keys), self._heads(values)

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, allowed: Tensor | None) -> Tensor:
        """Attend from `x` to the keys and values of `keys_values`.

        Args:
            x: (batch, length, features).
            keys: of the memory.
            values: of the memory.
            allowed: where attention may look, True = yes, for each query at least one place;
                broadcasts to (batch, heads, length, memory length).
        """
        return self._attended(self._heads(self.query(x)), keys, values, allowed)

    def _attended(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor | None,
        *,
        causal: bool = False,
    ) -> Tensor:
        attended = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, features) → (batch, heads, length, features of a head)."""
        batch, length, features = x.shape
        size = features // self.num_heads
        return x.view(batch, length, self.num_heads, size).transpose(1, 2)

    def _allowed(self, padding_mask: Tensor) -> Tensor:
        """Return where attention may look, True = yes, (batch, 1, length or 1, length)."""
        if not self.causal:
            return attended_positions(padding_mask)
        allowed = ~padding_mask[:, None, None, :]
        length = padding_mask.shape[-1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=padding_mask.device).tril()
        # A position always sees itself: a softmax over nothing (padding at the start) is NaN.
        return (allowed & earlier) | earlier.new_ones(length).diag()
