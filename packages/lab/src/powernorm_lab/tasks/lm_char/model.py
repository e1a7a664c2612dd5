"""Transformer-XL (Dai et al. 2019) with norms from a factory."""

import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.layers import SubLayers, embedding_norm, final_norm, norms_by_layer
from powernorm_lab.models.normed import HeadScale, NormFactory
from powernorm_lab.models.placements import layer_places
from powernorm_lab.models.positions import sinusoidal_positions
from powernorm_lab.models.stream_memory import StreamMemory

# Attention by content and by distance, over a segment and the memory before it.


BIAS_STD = 0.02
"""Standard deviation of the initial u and v, as for all weights in the released code."""


class RelativeAttention(nn.Module):
    """Causal attention of Transformer-XL (Dai et al. 2019, section 3.3).

    The score of query i and key j in a head of size d is

    `[(q_i + u) · k_j + (q_i + v) · W_R r_{i-j}] / √d`,

    with learned u and v, here separate for each layer, and the sinusoidal encoding r of the
    distance. No linear map has a bias.

    Args:
        num_features: number of features, divisible by `num_heads`.
        num_heads: number of heads.
        dropout: dropout of the attention weights, in training.
        scales_heads: whether each head has a learned scale before the output projection.

    Shape:
        - x: (batch, length, features)
        - context: (batch, memory + length, features), the memory followed by x
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
        """Reshape (batch, length, features) to (batch, heads, length, features of a head)."""
        heads: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return heads.transpose(1, 2)


def shifted(by_distance: Tensor) -> Tensor:
    """Convert scores by distance to scores by key, without a loop (Dai et al. 2019, appendix B).

    Row i has to be shifted by length - 1 - i to the left, since the distances of the keys differ
    between queries. Prepending a zero to each row and reshaping to rows that are one element
    shorter does that; elements shifted in from the right belong to later keys.

    Args:
        by_distance: (…, length, keys), with distances from keys - 1 to 0 along the last dimension.

    Returns:
        (…, length, keys), by position of the key; entries of keys after the query are arbitrary.

    >>> shifted(torch.tensor([[2, 1, 0], [5, 4, 3]]))
    tensor([[1, 0, 0],
            [5, 4, 3]])
    """
    length, keys = by_distance.shape[-2:]
    flat = F.pad(by_distance, (1, 0)).flatten(-2)
    rows: Tensor = flat[..., length:].unflatten(-1, (length, keys))
    return rows


def _later_positions(length: int, keys: int, device: torch.device) -> Tensor:
    """Return the mask of keys after each query, bool, (length, keys); queries are the last keys."""
    ones = torch.ones(length, keys, dtype=torch.bool, device=device)
    return ones.triu(diagonal=keys - length + 1)


def distance_encodings(
    keys: int, num_features: int, max_distance: int | None, device: torch.device
) -> Tensor:
    """Return the encodings of the distances keys - 1 … 0, (keys, features).

    Args:
        keys: number of distances.
        num_features: size of each encoding.
        max_distance: maximal distance, to which longer ones are clamped; None has no limit.
        device: device of the result.
    """
    distances = torch.arange(keys - 1, -1, -1, device=device)
    if max_distance is not None:
        distances = distances.clamp(max=max_distance)
    return sinusoidal_positions(keys, num_features, device=device)[distances]


class RelativeLayer(SubLayers):
    """A Transformer layer with a `RelativeAttention` over a memory and the segment."""

    def forward(
        self, x: Tensor, seen: Tensor | None, distances: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the context of its attention.

        Args:
            x: (batch, length, features).
            seen: memory of the attention, (batch, memory, features). With a norm before the
                attention it holds normalized positions, so that no position is normalized, or
                counted in batch statistics, a second time.
            distances: encodings, (memory + length, features).
            padding_mask: bool, (batch, length), True = padding.
        """
        contexts: list[Tensor] = []

        def attend(inner: Tensor) -> Tensor:
            contexts.append(inner if seen is None else torch.cat([seen.to(inner), inner], dim=1))
            attended: Tensor = self.attention(inner, contexts[0], distances)
            return attended

        return self._through(x, attend, padding_mask), contexts[0]


class TransformerXL(nn.Module):
    """Predicts each token from those before it, including tokens before its segment.

    The model embeds tokens (scaled by √features), applies causal layers with relative positions,
    and computes logits with the transposed embedding and a bias. With most placements another norm
    follows the last layer. Each layer's attention also attends to the last `memory_length`
    positions before the segment, as computed in the previous batch, without gradients. In
    evaluation no output depends on a later token, for any norm.

    A batch with `starts` uses and updates a memory (`StreamMemory`); training and evaluation have
    separate memories, which are neither weights nor buffers. Without `starts` no memory is used.

    Args:
        vocabulary_size: number of tokens.
        norm: builds every norm of the model, or of its lowest layers.
        shape: shape of the layers; its dropout also applies to the encodings of distances and
            before the logits.
        memory_length: positions of the memory in training.
        evaluation_memory_length: the same in evaluation; None is `memory_length`.
        num_lanes: number of interleaved sequences of batches, such as the micro-batches of an
            update, which measurements read in evaluation, too.
        max_distance: maximal distance, to which longer ones are clamped; None has no limit. It is
            useful if the memory is longer in evaluation than in training, where such distances do
            not occur.
        seed: seed of the initial weights, which are the same for every norm.
        upper_norm: builds the norms above the lowest layers.

    Shape:
        - tokens: int64, (batch, length)
        - starts: int64, (batch,), position of each row in the text
        - padding_mask: bool, (batch, length), True = padding, at the end of rows
        - output: logits, (batch, length, vocabulary_size)

    Raises:
        InputError: `num_heads` does not divide `num_features`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        norm: NormFactory,
        shape: TransformerShape,
        *,
        memory_length: int,
        evaluation_memory_length: int | None = None,
        num_lanes: int = 1,
        max_distance: int | None = None,
        seed: int = 0,
        upper_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        norms = norms_by_layer(norm, shape, upper_norm)
        if evaluation_memory_length is None:
            evaluation_memory_length = memory_length
        self.max_distance = max_distance
        self.embedding_scale = math.sqrt(shape.num_features)
        self.embedding = nn.Embedding(vocabulary_size, shape.num_features)
        self.embedding_norm = embedding_norm(shape, norms[0])
        self.dropout = Dropout(shape.dropout)
        self.layers = nn.ModuleList(
            RelativeLayer(
                RelativeAttention(
                    shape.num_features,
                    shape.num_heads,
                    dropout=shape.attention_dropout,
                    scales_heads=places.scales_heads,
                ),
                shape,
                layer_norm,
                places=places,
            )
            for layer_norm, places in zip(norms, layer_places(shape), strict=True)
        )
        self.final_norm = final_norm(shape, norms[-1])
        initialize(self, seed, shape.initialization)
        self.head = nn.Linear(shape.num_features, vocabulary_size)
        nn.init.zeros_(self.head.bias)
        self.head.weight = self.embedding.weight
        self._training_memory = StreamMemory(memory_length, num_lanes)
        self._evaluation_memory = StreamMemory(evaluation_memory_length, num_lanes)

    def forward(
        self, tokens: Tensor, starts: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return the logits of the token after each position."""
        logits: Tensor = self.head(self.features(tokens, starts, padding_mask))
        return logits

    def features(
        self, tokens: Tensor, starts: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return the features before the output layer, (batch, length, features)."""
        memory = self._training_memory if self.training else self._evaluation_memory
        seen = None if starts is None else memory.recall(starts)
        x: Tensor = self.embedding(tokens) * self.embedding_scale
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, padding_mask)
        x = self.dropout(x)
        x, contexts = self._through_layers(x, seen, padding_mask)
        if starts is not None:
            # A batch with padding at its end cannot be continued.
            memory.keep(tokens.shape[1], contexts if padding_mask is None else None)
        if self.final_norm is not None:
            x = self.final_norm(x, padding_mask)
        features: Tensor = self.dropout(x)
        return features

    def memory_state(self) -> list[dict[str, Tensor]]:
        """Return the memory of the training, for a checkpoint; see `StreamMemory.state`."""
        return self._training_memory.state()

    def load_memory_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore the memory that `memory_state` returned."""
        self._training_memory.load_state(state)

    def _through_layers(
        self, x: Tensor, seen: Sequence[Tensor] | None, padding_mask: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        keys = x.shape[1] + (seen[0].shape[1] if seen else 0)
        encodings = distance_encodings(keys, x.shape[2], self.max_distance, x.device)
        distances = self.dropout(encodings.to(x.dtype))
        contexts = []
        for layer, before in zip(self.layers, seen or repeat(None), strict=False):
            x, context = layer(x, before, distances, padding_mask)
            contexts.append(context)
        return x, contexts
