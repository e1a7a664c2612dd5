"""The models that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Shape:
    """A pre-norm encoder-decoder with LayerNorm, ReLU, one table for all embeddings, and its batch.

    Dropout falls where Joey NMT has it: embeddings, attention weights, activations, sublayers.
    """

    name: str
    num_layers: int
    """Number of layers of the encoder, and of the decoder."""
    num_features: int
    num_heads: int
    feedforward_features: int
    batch_tokens: int
    """Positions of the longer side, padding included."""
    dropout: float = 0.3
    label_smoothing: float = 0.1
    learning_rate: float = 0.0005
    vocabulary_size: int = 10_000
    max_length: int = 128
    """Subwords of a training sentence, the end mark included."""


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("small", 6, 512, 4, 1024, batch_tokens=4096),
        Shape("small-cpu", 3, 256, 4, 1024, batch_tokens=2048),
    )
}


@dataclass(frozen=True)
class Search:
    """A beam search in which every hypothesis gets the full length."""

    num_sentences: int = 64
    """All in one batch."""
    beam_size: int = 5
    length_penalty: float = 1.0
    """α of ((5 + n) / 6)^α, the only penalty that Joey NMT has."""
    length: int = 24
    """Subwords of every translation."""
