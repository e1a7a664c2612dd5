"""The exclusive choices of an architecture, by name, and the shape of a Transformer."""

from dataclasses import dataclass
from typing import Literal

from powernorm.records import Placement as Placement

Activation = Literal["gelu", "relu", "cube"]
"""The non-linearity between linear maps; `cube`, x³, is that of Chen and Manning (2014)."""

Initialization = Literal["xavier", "kaiming"]
"""How linear maps begin: uniform after Glorot and Bengio (2010), or after He et al. (2015) as
torch's own linear layers do."""

QueryKeyNorm = Literal["per_head", "whole"]
"""What is normalized of queries and keys: the features of each head, by one norm that all heads
share, or those of all heads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """What the layers of a Transformer have in common, and how it begins."""

    num_features: int = 128
    """C, the size of the features between the layers."""
    num_layers: int = 2
    """Layers, of an encoder and a decoder those of the encoder."""
    num_heads: int = 4
    """Heads of each attention; they divide `num_features`."""
    feedforward_features: int = 512
    """Size inside the feed-forward networks."""
    placement: Placement = "pre"
    """Where the norms stand."""
    embedding_norm: bool | None = None
    """Whether a norm follows the embeddings; None is with `peri` only."""
    qk_norm: QueryKeyNorm | None = None
    """What norms of queries and keys look at; None has none."""
    activation: Activation = "gelu"
    """Of the feed-forward networks."""
    dropout: float = 0.0
    """Of the embeddings and of what every sub-layer adds, in training."""
    attention_dropout: float = 0.0
    """Of the attention weights, in training."""
    activation_dropout: float | None = None
    """After the activations, in training; None is `dropout`."""
    initialization: Initialization = "xavier"
    """How the linear maps begin."""
    num_norm_layers: int | None = None
    """Lowest layers whose norms are those that are compared; None is all. Those of the layers above
    are made by `upper_norm`, and so is the final norm, which belongs to the highest layer."""
