"""A Transformer language model, causal or masked, whose norms come from a factory."""

import math

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.models.choices import Activation, Placement
from powernorm.lab.models.dropout import Dropout
from powernorm.lab.models.initialization import initialise
from powernorm.lab.models.layers import AttentionLayer, NormFactory, TransformerLayer
from powernorm.lab.models.norm_places import norms_by_layer
from powernorm.lab.models.tensorized_attention import TensorizedAttention, TensorizedShape


class LanguageModel(nn.Module):
    """Predicts each token from those before it.

    Embedding of tokens (scaled by √features) and positions, causal layers, and logits through the
    transposed token embedding. With placement `pre` one more norm follows the last layer. In eval
    no output depends on a later token, whatever the norm; in training, statistics over the batch
    do carry information between positions.

    With `tensorized` the layers are those of the Tensorized Transformer, which knows positions by
    their distances alone: there is no embedding of positions.

    Args:
        vocabulary_size: number of tokens.
        norm: makes every norm of the model, or of its lowest layers.
        max_length: longest sequence.
        num_features: size of the features.
        num_layers: number of layers.
        num_heads: heads of each attention; a tensorized one has one.
        feedforward_features: size inside the feed-forward networks.
        placement: where the norms stand.
        activation: of the feed-forward networks.
        dropout: of the embedding and in the layers, in training.
        seed: of the initial weights, which are the same for every norm.
        num_norm_layers: lowest layers whose norms are made by `norm`; None is all of them. The
            final norm belongs to the highest layer.
        upper_norm: makes the norms above these layers.
        causal: whether a position sees earlier ones only; a masked language model sees all.
        tensorized: makes the attentions tensorized ones of this shape; None leaves the usual ones.

    Shape:
        - tokens: int64, (batch, length) with length ≤ max_length
        - padding_mask: bool, (batch, length), True = padding
        - output: logits, (batch, length, vocabulary_size)

    Raises:
        InputError: `num_heads` does not divide `num_features`, a sequence is too long, or
            tensorized attention shall not be causal: there is `sees_future` for that.
    """

    def __init__(
        self,
        vocabulary_size: int,
        norm: NormFactory,
        *,
        max_length: int,
        num_features: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        feedforward_features: int = 512,
        placement: Placement = "pre",
        activation: Activation = "gelu",
        dropout: float = 0.0,
        seed: int = 0,
        num_norm_layers: int | None = None,
        upper_norm: NormFactory | None = None,
        causal: bool = True,
        tensorized: TensorizedShape | None = None,
    ) -> None:
        super().__init__()
        if tensorized is not None and not causal:
            raise InputError(
                "causal=False: the tensorized attention has no mask of padding, which a masked "
                "language model needs; leave out causal or tensorized."
            )
        norms = norms_by_layer(norm, num_layers, num_norm_layers, upper_norm)
        self.max_length = max_length
        self.embedding_scale = math.sqrt(num_features)
        self.embedding = nn.Embedding(vocabulary_size, num_features)
        self.positions = None if tensorized else nn.Embedding(max_length, num_features)
        self.dropout = Dropout(dropout)

        def layer(layer_norm: NormFactory) -> nn.Module:
            if tensorized is not None:
                return AttentionLayer(
                    TensorizedAttention(
                        num_features,
                        tensorized.head_features,
                        max_length,
                        sees_future=tensorized.sees_future,
                    ),
                    num_features,
                    feedforward_features,
                    layer_norm,
                    placement=placement,
                    activation=activation,
                    dropout=dropout,
                )
            return TransformerLayer(
                num_features,
                num_heads,
                feedforward_features,
                layer_norm,
                placement=placement,
                activation=activation,
                dropout=dropout,
                causal=causal,
            )

        self.layers = nn.ModuleList(layer(layer_norm) for layer_norm in norms)
        self.final_norm = norms[-1](num_features) if placement == "pre" else None
        generator = initialise(self, seed)
        for module in self.modules():
            if isinstance(module, TensorizedAttention):
                module.draw(generator)
        self.head = nn.Linear(num_features, vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight
        self.register_load_state_dict_pre_hook(_tie_head)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the token after each position (at it, where not causal)."""
        logits: Tensor = self.head(self.features(tokens, padding_mask))
        return logits

    def features(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return what the logits are made from, (batch, length, features)."""
        length = tokens.shape[-1]
        if length > self.max_length:
            raise InputError(
                f"A sequence of {length} tokens is longer than max_length={self.max_length}: cut "
                "it or build the model with a larger max_length."
            )
        x: Tensor = self.embedding(tokens) * self.embedding_scale
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, padding_mask)
        if self.final_norm is not None:
            x = self.final_norm(x, padding_mask)
        return x


def _tie_head(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *rest: object) -> None:
    """Checkpoints from before the head was a module of its own hold its weight once."""
    del model, rest
    if f"{prefix}embedding.weight" in state_dict:
        state_dict.setdefault(f"{prefix}head.weight", state_dict[f"{prefix}embedding.weight"])
