"""Named options of architectures, and the shape of a Transformer."""

from dataclasses import dataclass
from typing import Literal

from powernorm.records import Placement as Placement

Activation = Literal["gelu", "relu", "cube"]
"""The non-linearity between linear maps; `cube`, x³, is that of Chen and Manning (2014)."""

Initialization = Literal["xavier", "kaiming"]
"""Initialization of linear maps: uniform after Glorot and Bengio (2010), or after He et al. (2015)
as in torch's linear layers."""

QueryKeyNorm = Literal["per_head", "whole"]
"""Normalized features of queries and keys: those of each head, with one norm that all heads share,
or those of all heads together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Sizes, placement of norms, dropout and initialization of a Transformer's layers."""

    num_features: int = 128
    """C, the number of features between the layers."""
    num_layers: int = 2
    """Number of layers; with a decoder, those of the encoder."""
    num_heads: int = 4
    """Number of heads of each attention; divides `num_features`."""
    feedforward_features: int = 512
    """Hidden size of the feed-forward networks."""
    placement: Placement = "pre"
    """Placement of the norms."""
    embedding_norm: bool | None = None
    """Whether a norm follows the embeddings; None means with `peri` only."""
    qk_norm: QueryKeyNorm | None = None
    """Norms of queries and keys; None for no such norms."""
    activation: Activation = "gelu"
    """Activation of the feed-forward networks."""
    dropout: float = 0.0
    """Dropout of the embeddings and of the output of every sub-layer, in training."""
    attention_dropout: float = 0.0
    """Dropout of the attention weights, in training."""
    activation_dropout: float | None = None
    """Dropout after the activations, in training; None is `dropout`."""
    initialization: Initialization = "xavier"
    """Initialization of the linear maps."""
    num_norm_layers: int | None = None
    """Number of lowest layers with the compared norm; None is all. `upper_norm` builds the norms of
    the layers above, and with them the final norm, which belongs to the highest layer."""
