"""A Transformer encoder that tells the class of a text, whose norms come from a factory."""

import math
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.layers import (
    TransformerLayer,
    embedding_norm,
    final_norm,
    norms_by_layer,
)
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.models.placements import layer_places
from powernorm_lab.tasks.classify.settings import Pooling

EMBEDDING_STD: Final = 0.02
"""Deviation of the embeddings of words and positions at the start. Half of the words of a small
data set occur once: what they begin with is noise to the classes, and it is not unlearned where it
is as large as what is learned (deviation 1 / √features, the start of the language models here,
costs RT a point or two of accuracy)."""


class TextClassifier(nn.Module):
    """Gives the logits of the classes of a text.

    Embeddings of words and learned ones of positions, layers in which every position sees every
    other, one vector of all positions by `pooling`, and a linear map of it. With most placements
    one more norm follows the last layer. Padding has no say anywhere: it is not attended to, the
    norms get its mask, and pooling leaves it out.

    Args:
        num_words: number of ids of words.
        num_classes: number of classes.
        norm: makes every norm of the model, or of its lowest layers.
        shape: of its layers.
        max_length: most words of a text.
        embedding_features: size of the words' embeddings; where it is not `num_features`, a
            linear map follows them.
        pooling: `mean` or `max` over the positions, or `cls`: a learned vector goes in front of the
            words, and what the layers make of it is used.
        embedding_dropout: of whole words, in training: of so many positions the embedding of the
            word is 0 and only its position is left. (The others are not scaled up: a pre-norm
            layer would undo it.)
        output_dropout: of the pooled vector, in training.
        seed: of the initial weights, which are the same for every norm.
        upper_norm: makes the norms above the lowest layers.
        qk_norm: makes the norms of queries and keys, where the shape has them; None is the layer's
            own norm.

    Shape:
        - tokens: int64, (batch, length) with length ≤ max_length
        - padding_mask: bool, (batch, length), True = padding
        - output: logits, (batch, num_classes)

    Raises:
        InputError: `num_heads` does not divide `num_features`, or a text is too long.
    """

    def __init__(
        self,
        num_words: int,
        num_classes: int,
        norm: NormFactory,
        shape: TransformerShape,
        *,
        max_length: int,
        embedding_features: int | None = None,
        pooling: Pooling = "mean",
        embedding_dropout: float = 0.0,
        output_dropout: float = 0.0,
        seed: int = 0,
        upper_norm: NormFactory | None = None,
        qk_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        norms = norms_by_layer(norm, shape, upper_norm)
        num_features = shape.num_features
        width = num_features if embedding_features is None else embedding_features
        self.max_length = max_length
        self.pooling = pooling
        self.embedding = nn.Embedding(num_words, width)
        self.projection = None if width == num_features else nn.Linear(width, num_features)
        self.positions = nn.Embedding(max_length, num_features)
        self.mark = nn.Parameter(torch.zeros(num_features)) if pooling == "cls" else None
        self.embedding_dropout = embedding_dropout
        self.embedding_norm = embedding_norm(shape, norms[0])
        self.dropout = Dropout(shape.dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(shape, layer_norm, places=places, qk_norm=qk_norm)
            for layer_norm, places in zip(norms, layer_places(shape), strict=True)
        )
        self.final_norm = final_norm(shape, norms[-1])
        self.output_dropout = Dropout(output_dropout)
        self.head = nn.Linear(num_features, num_classes)
        generator = initialize(self, seed, shape.initialization)
        for table in (self.embedding.weight, self.positions.weight, self.mark):
            if table is not None:
                nn.init.normal_(table, std=EMBEDDING_STD, generator=generator)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the classes of each text."""
        states, mask = self._states(tokens, padding_mask)
        logits: Tensor = self.head(self.output_dropout(self._pooled(states, mask)))
        return logits

    def features(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return what is pooled, (batch, length, features); with `cls` one position more."""
        return self._states(tokens, padding_mask)[0]

    def _states(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output of the layers and its padding."""
        x = self._embedded(tokens)
        if self.mark is not None:
            x = torch.cat([self.mark.expand(len(x), 1, -1), x], dim=1)
            if mask is not None:
                # The mark of a row of nothing but padding is padding, too.
                mask = torch.cat([mask.all(dim=1, keepdim=True), mask], dim=1)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, mask)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, mask)
        if self.final_norm is not None:
            x = self.final_norm(x, mask)
        return x, mask

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of words and positions, (batch, length, features)."""
        length = tokens.shape[-1]
        if length > self.max_length:
            raise InputError(
                f"a text of {length} words is longer than max_length={self.max_length}: cut it or "
                "build the model with a larger max_length"
            )
        words: Tensor = self.embedding(tokens)
        if self.training and self.embedding_dropout > 0:
            kept = torch.rand(tokens.shape, device=tokens.device) >= self.embedding_dropout
            words = words * kept[..., None]
        if self.projection is not None:
            words = self.projection(words)
        positions: Tensor = self.positions(torch.arange(length, device=tokens.device))
        return words + positions

    def _pooled(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Return one vector of all positions that are no padding, (batch, features)."""
        if self.pooling == "cls":
            return states[:, 0]
        if mask is None:
            return states.mean(dim=1) if self.pooling == "mean" else states.amax(dim=1)
        hidden = mask[..., None]
        if self.pooling == "mean":
            counts = (~mask).sum(dim=1, keepdim=True).clamp(min=1)
            return states.masked_fill(hidden, 0.0).sum(dim=1) / counts
        # Of nothing but padding the maximum is that of the padding: no infinity gets into the loss.
        hidden = hidden & ~mask.all(dim=1)[:, None, None]
        return states.masked_fill(hidden, -math.inf).amax(dim=1)
