"""A Transformer language model with norms from a factory."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.layers import (
    AttentionLayer,
    TransformerLayer,
    embedding_norm,
    final_norm,
    norms_by_layer,
)
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.models.placements import LayerPlaces, layer_places


class LanguageModel(nn.Module):
    """Predicts each token from those before it.

    The model embeds tokens (scaled by √features) and positions, applies causal layers, and computes
    logits with the transposed token embedding. With most placements another norm follows the last
    layer. In evaluation no output depends on a later token, for any norm; in training, batch
    statistics carry information between positions.

    With a custom `attention`, such as that of the Tensorized Transformer, which uses only the
    distances of positions, there is no embedding of positions.

    Args:
        vocabulary_size: number of tokens.
        norm: builds every norm of the model, or of its lowest layers.
        shape: shape of the layers.
        max_length: maximal length of a sequence.
        seed: seed of the initial weights, which are the same for every norm.
        upper_norm: builds the norms above the lowest layers.
        attention: builds the attention of each layer, whose forward takes `(x, padding_mask=…)`;
            None is `MultiHeadAttention`.
        qk_norm: builds the norms of queries and keys, if the shape has them; None is the norm of
            the layer.

    Shape:
        - tokens: int64, (batch, length) with length ≤ max_length
        - padding_mask: bool, (batch, length), True = padding
        - output: logits, (batch, length, vocabulary_size)

    Raises:
        InputError: `num_heads` does not divide `num_features`, a sequence is too long, or the
            placement has norms or scales inside of the attention and `attention` is given.
    """

    def __init__(
        self,
        vocabulary_size: int,
        norm: NormFactory,
        shape: TransformerShape,
        *,
        max_length: int,
        seed: int = 0,
        upper_norm: NormFactory | None = None,
        attention: Callable[[], nn.Module] | None = None,
        qk_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        all_places = layer_places(shape)
        has_inner = shape.qk_norm or any(
            one.linears or one.heads or one.scales_heads for one in all_places
        )
        if attention is not None and has_inner:
            raise InputError(
                f"placement={shape.placement} with qk_norm={shape.qk_norm}: a custom attention "
                "has no place for norms or scales inside of it; choose other ones, or leave "
                "attention out"
            )
        norms = norms_by_layer(norm, shape, upper_norm)
        self.max_length = max_length
        self.embedding_scale = math.sqrt(shape.num_features)
        self.embedding = nn.Embedding(vocabulary_size, shape.num_features)
        self.positions = None if attention else nn.Embedding(max_length, shape.num_features)
        self.embedding_norm = embedding_norm(shape, norms[0])
        self.dropout = Dropout(shape.dropout)

        def layer(layer_norm: NormFactory, places: LayerPlaces) -> nn.Module:
            if attention is not None:
                return AttentionLayer(attention(), shape, layer_norm, places=places)
            return TransformerLayer(shape, layer_norm, causal=True, places=places, qk_norm=qk_norm)

        self.layers = nn.ModuleList(map(layer, norms, all_places))
        self.final_norm = final_norm(shape, norms[-1])
        initialize(self, seed, shape.initialization)
        self.head = nn.Linear(shape.num_features, vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the token after each position."""
        logits: Tensor = self.head(self.features(tokens, padding_mask))
        return logits

    def features(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the features before the output layer, (batch, length, features)."""
        length = tokens.shape[-1]
        if length > self.max_length:
            raise InputError(
                f"a sequence of {length} tokens is longer than max_length={self.max_length}: cut "
                "it or build the model with a larger max_length"
            )
        x: Tensor = self.embedding(tokens) * self.embedding_scale
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, padding_mask)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, padding_mask)
        if self.final_norm is not None:
            x = self.final_norm(x, padding_mask)
        return x
