"""Multi-head attention on torch's scaled-dot-product kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError


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
        keys, values = self.key_value(x if memory is None else memory).chunk(2, dim=-1)
        attended = F.scaled_dot_product_attention(
            query,
            self._heads(keys),
            self._heads(values),
            attn_mask=None if padding_mask is None else self._allowed(padding_mask),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and padding_mask is None,
        )
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, features) → (batch, heads, length, features of a head)."""
        batch, length, _ = x.shape
        return x.view(batch, length, self.num_heads, -1).transpose(1, 2)

    def _allowed(self, padding_mask: Tensor) -> Tensor:
        """Return where attention may look, True = yes, (batch, 1, length or 1, length)."""
        allowed = ~padding_mask[:, None, None, :]
        if not self.causal:
            return allowed
        length = padding_mask.shape[-1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=padding_mask.device).tril()
        # A position always sees itself: a softmax over nothing (padding at the start) is NaN.
        return (allowed & earlier) | earlier.new_ones(length).diag()
