"""Transformer-XL (Dai et al. 2019), whose norms come from a factory."""

import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.lab.models.choices import TransformerShape
from powernorm.lab.models.dropout import Dropout
from powernorm.lab.models.initialization import initialize
from powernorm.lab.models.layers import SubLayers, embedding_norm, final_norm, norms_by_layer
from powernorm.lab.models.normed import NormFactory
from powernorm.lab.models.placements import layer_places
from powernorm.lab.models.stream_memory import StreamMemory
from powernorm.lab.tasks.lm_char.relative_attention import RelativeAttention, distance_encodings


class RelativeLayer(SubLayers):
    """The layer of a Transformer around a `RelativeAttention`, which also looks at a memory."""

    def forward(
        self, x: Tensor, seen: Tensor | None, distances: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output and what its attention looked at.

        Args:
            x: (batch, length, features).
            seen: what the attention looked at before, (batch, memory, features); where a norm is
                before the attention, what was behind it, so that no position is normalized, or
                counted by batch statistics, a second time.
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
    """Predicts each token from those before it, also from before its segment.

    Embedding of tokens, scaled by √features, causal layers with relative positions, logits through
    the transposed embedding and a bias. With most placements one more norm follows the last layer.
    Each layer's attention also sees the last `memory_length` positions before the segment, as they
    were in the batch before, without a gradient into them. In eval no output depends on a later
    token, whatever the norm.

    A batch with `starts` uses and leaves a memory (`StreamMemory`), one in training and another in
    evaluation, neither of which is a weight or a buffer; without `starts` there is none.

    Args:
        vocabulary_size: number of tokens.
        norm: makes every norm of the model, or of its lowest layers.
        shape: of its layers; its dropout is also that of the encodings of distances and before the
            logits.
        memory_length: positions of the memory in training.
        evaluation_memory_length: the same in evaluation; None is `memory_length`.
        num_lanes: batches with rows of their own that take turns, such as the micro-batches of an
            update, which measurements read in evaluation as well.
        max_distance: longer distances count as this one; None has no limit. Of use where the
            evaluation has a longer memory than the training, which has never seen such distances.
        seed: of the initial weights, which are the same for every norm.
        upper_norm: makes the norms above the lowest layers.

    Shape:
        - tokens: int64, (batch, length)
        - starts: int64, (batch,), where in the text each row begins
        - padding_mask: bool, (batch, length), True = padding, which stands at the end
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
        """Return what the logits are made from, (batch, length, features)."""
        memory = self._training_memory if self.training else self._evaluation_memory
        seen = None if starts is None else memory.recall(starts)
        x: Tensor = self.embedding(tokens) * self.embedding_scale
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, padding_mask)
        x = self.dropout(x)
        x, contexts = self._through_layers(x, seen, padding_mask)
        if starts is not None:
            # What is padded at its end cannot be gone on from.
            memory.keep(tokens.shape[1], contexts if padding_mask is None else None)
        if self.final_norm is not None:
            x = self.final_norm(x, padding_mask)
        features: Tensor = self.dropout(x)
        return features

    def memory_state(self) -> list[dict[str, Tensor]]:
        """Return the memory of the training, for a checkpoint; see `StreamMemory.state`."""
        return self._training_memory.state()

    def load_memory_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `memory_state` returned."""
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
