"""A Transformer encoder for text classification with norms from a factory."""

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
"""Standard deviation of the initial embeddings of words and positions. Half of the words of a small
data set occur once. Their initial embeddings are noise to the classifier, which training does not
remove if it is as large as the learned part: the standard deviation 1 / √features of the language
models here costs one or two points of accuracy on RT."""


class TextClassifier(nn.Module):
    """Classifies texts with a Transformer encoder.

    The model adds embeddings of words and learned embeddings of positions, applies layers with
    bidirectional attention, pools all positions into one vector, and maps it to logits. With most
    placements another norm follows the last layer. Padding has no effect: it is not attended to,
    the norms get its mask, and pooling ignores it.

    Args:
        num_words: number of ids of words.
        num_classes: number of classes.
        norm: builds every norm of the model, or of its lowest layers.
        shape: shape of the layers.
        max_length: maximal number of words of a text.
        embedding_features: size of the words' embeddings; if it is not `num_features`, a linear map
            follows them.
        pooling: `mean` or `max` over the positions, or `cls`: the output at a learned vector that
            is prepended to the words.
        embedding_dropout: probability, in training, with which the embedding of a word is 0, so
            that only its position remains. (The others are not scaled up, because a pre-norm layer
            would undo it.)
        output_dropout: dropout of the pooled vector, in training.
        seed: seed of the initial weights, which are the same for every norm.
        upper_norm: builds the norms above the lowest layers.
        qk_norm: builds the norms of queries and keys, if the shape has them; None is the norm of
            the layer.

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
        """Return the features before pooling, (batch, length, features); one more with `cls`."""
        return self._states(tokens, padding_mask)[0]

    def _states(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output of the layers and its padding mask."""
        x = self._embedded(tokens)
        if self.mark is not None:
            x = torch.cat([self.mark.expand(len(x), 1, -1), x], dim=1)
            if mask is not None:
                # In a row of padding only, the prepended position is padding, too.
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
        """Return one vector from all positions without padding, (batch, features)."""
        if self.pooling == "cls":
            return states[:, 0]
        if mask is None:
            return states.mean(dim=1) if self.pooling == "mean" else states.amax(dim=1)
        hidden = mask[..., None]
        if self.pooling == "mean":
            counts = (~mask).sum(dim=1, keepdim=True).clamp(min=1)
            return states.masked_fill(hidden, 0.0).sum(dim=1) / counts
        # For a row of padding only, pool the padding, so that the loss has no infinity.
        hidden = hidden & ~mask.all(dim=1)[:, None, None]
        return states.masked_fill(hidden, -math.inf).amax(dim=1)
