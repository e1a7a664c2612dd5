"""Multi-head attention on torch's scaled-dot-product kernel."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.choices import QueryKeyNorm
from powernorm_lab.models.normed import HeadScale, Normed, NormFactory, apply_masked


def attended_positions(padding_mask: Tensor) -> Tensor:
    """Return the attention mask of a padded memory, True = attend, (batch, 1, 1, length).

    A row of padding only attends to all positions: a softmax over nothing is NaN.
    """
    allowed = ~padding_mask[:, None, None, :]
    return allowed | ~allowed.any(dim=-1, keepdim=True)


class NormOfHeads(nn.Module):
    """A norm of queries and keys (qk-norm) or of values (HybridNorm).

    `per_head` normalizes the features of each head with one norm that all heads share: one weight,
    and with batch statistics one mean and variance for each feature of a head. `whole` normalizes
    all features together: statistics of a token are over all heads, those of a batch are for each
    head and feature.

    Args:
        kind: `per_head` or `whole`.
        num_features: number of features of all heads.
        num_heads: number of heads.
        norm: builds the norm.

    Shape:
        - x: (batch, length, num_features)
        - padding_mask: (batch, length)
        - output: (batch, heads, length, features of a head)
    """

    def __init__(
        self, kind: QueryKeyNorm, num_features: int, num_heads: int, norm: NormFactory
    ) -> None:
        super().__init__()
        self.kind = kind
        self.num_heads = num_heads
        self.norm = norm(num_features if kind == "whole" else num_features // num_heads)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the normalized heads."""
        if self.kind == "whole":
            return _split_heads(self.norm(x, padding_mask), self.num_heads)
        heads = x.unflatten(-1, (self.num_heads, -1))
        mask = None if padding_mask is None else padding_mask[..., None].expand(heads.shape[:-1])
        normalized: Tensor = self.norm(heads, mask)
        return normalized.transpose(1, 2)


class HeadNorms(NamedTuple):
    """Norms of queries and keys, and of values if `values` is True."""

    kind: QueryKeyNorm
    norm: NormFactory
    values: bool = False


class MultiHeadAttention(nn.Module):
    """Self-attention, or attention over another sequence (the memory).

    Args:
        num_features: number of features, divisible by `num_heads`.
        num_heads: number of heads.
        dropout: dropout of the attention weights, in training.
        causal: whether a position attends only to itself and earlier ones (self-attention).
        scales_heads: whether each head has a learned scale before the output projection.
        linear_norm: builds a norm after each linear map; None for no norms.
        head_norms: build the norms of queries, keys and possibly values; None for no norms.

    Shape:
        - x: (batch, length, features)
        - memory: (batch, memory length, features)
        - padding_mask: (batch, memory length), or (batch, length) without a memory
        - query_mask: (batch, length)
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
        causal: bool = False,
        scales_heads: bool = False,
        linear_norm: NormFactory | None = None,
        head_norms: HeadNorms | None = None,
    ) -> None:
        super().__init__()
        if num_features % num_heads:
            raise InputError(
                f"num_heads={num_heads} does not divide num_features={num_features}: choose a "
                "divisor"
            )
        self.num_heads = num_heads
        self.dropout = dropout
        self.causal = causal
        self.query = linear(num_features, num_features, linear_norm)
        self.key_value = linear(num_features, 2 * num_features, linear_norm)
        self.output = linear(num_features, num_features, linear_norm)
        self.head_scale = HeadScale(num_heads) if scales_heads else None
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        self.value_norm: nn.Module | None = None
        if head_norms is not None:
            kind, norm, has_values = head_norms
            self.query_norm = NormOfHeads(kind, num_features, num_heads, norm)
            self.key_norm = NormOfHeads(kind, num_features, num_heads, norm)
            if has_values:
                self.value_norm = NormOfHeads(kind, num_features, num_heads, norm)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        padding_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from `x` to `memory`, or to `x` itself without a memory, but not to padding.

        Args:
            x: (batch, length, features).
            memory: sequence to attend to.
            padding_mask: mask of the memory, or of x without a memory.
            query_mask: mask of x for norms only; attention does not use it. Without a memory the
                default is `padding_mask`.
        """
        if memory is None:
            query_mask = padding_mask if query_mask is None else query_mask
            key_mask = query_mask
        else:
            key_mask = padding_mask
        query = self._queries(x, query_mask)
        keys, values = self.keys_values(x if memory is None else memory, key_mask)
        allowed = None if padding_mask is None else self._allowed(padding_mask)
        causal = self.causal and padding_mask is None
        return self._attended(query, keys, values, allowed, causal=causal, mask=query_mask)

    def keys_values(
        self, memory: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values for `attend`, (batch, heads, memory length, features of a head).

        Args:
            memory: (batch, memory length, features).
            padding_mask: mask of the memory, for norms.
        """
        if self.key_norm is not None and isinstance(self.key_value, nn.Linear):
            # Two linear maps by rows of one weight, so that a norm of the keys folds into its rows.
            size = self.key_value.in_features
            weight, bias = self.key_value.weight, self.key_value.bias
            keys = F.linear(memory, weight[:size], bias[:size])
            values = F.linear(memory, weight[size:], bias[size:])
        else:
            keys, values = apply_masked(self.key_value, memory, padding_mask).chunk(2, dim=-1)
        return (
            self._heads(keys, self.key_norm, padding_mask),
            self._heads(values, self.value_norm, padding_mask),
        )

    def branch_weights(self) -> list[Tensor]:
        """Return the weights of values and output with their biases, for DeepNorm."""
        assert isinstance(self.key_value, nn.Linear)
        assert isinstance(self.output, nn.Linear)
        size = self.key_value.in_features
        values = (self.key_value.weight[size:], self.key_value.bias[size:])
        return [*values, self.output.weight, self.output.bias]

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, allowed: Tensor | None) -> Tensor:
        """Attend from `x` to the keys and values of `keys_values`.

        Args:
            x: (batch, length, features).
            keys: keys of the memory.
            values: values of the memory.
            allowed: attention mask, True = attend, with at least one position for each query;
                broadcasts to (batch, heads, length, memory length).
        """
        return self._attended(self._queries(x, None), keys, values, allowed)

    def _queries(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self._heads(apply_masked(self.query, x, mask), self.query_norm, mask)

    def _attended(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor | None,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        attended = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        mixed = attended.transpose(1, 2).flatten(2)
        if self.head_scale is not None:
            mixed = self.head_scale(mixed)
        return apply_masked(self.output, mixed, mask)

    def _heads(self, x: Tensor, norm: nn.Module | None, mask: Tensor | None) -> Tensor:
        if norm is None:
            return _split_heads(x, self.num_heads)
        normalized: Tensor = norm(x, mask)
        return normalized

    def _allowed(self, padding_mask: Tensor) -> Tensor:
        """Return the attention mask, True = attend, (batch, 1, length or 1, length)."""
        if not self.causal:
            return attended_positions(padding_mask)
        allowed = ~padding_mask[:, None, None, :]
        length = padding_mask.shape[-1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=padding_mask.device).tril()
        # A position always attends to itself: a softmax over nothing (leading padding) is NaN.
        return (allowed & earlier) | earlier.new_ones(length).diag()


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Reshape (batch, length, features) to (batch, heads, length, features of a head)."""
    batch, length, features = x.shape
    return x.view(batch, length, num_heads, features // num_heads).transpose(1, 2)


def linear(num_inputs: int, num_outputs: int, norm: NormFactory | None) -> nn.Module:
    """Return a linear map, with a norm of its output if `norm` is not None."""
    plain = nn.Linear(num_inputs, num_outputs)
    return plain if norm is None else Normed(plain, norm(num_outputs))
