"""Parts of a Transformer layer: feed-forward network, residual connections, whole layers."""

from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.attention import HeadNorms, MultiHeadAttention, linear
from powernorm_lab.models.choices import Activation, TransformerShape
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.normed import Normed, NormFactory, apply_masked
from powernorm_lab.models.placements import (
    WITHOUT_FINAL_NORM,
    LayerPlaces,
    SubLayerPlaces,
    has_embedding_norm,
    layer_places,
)

Norms = TypeVar("Norms")


class Cube(nn.Module):
    """x³ (Chen and Manning 2014)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the third power of each element."""
        return x * x * x


ACTIVATIONS: dict[Activation, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "cube": Cube}


class Branches(Protocol):
    """A module with initial weights that DeepNorm scales down."""

    def branch_weights(self) -> list[Tensor]:
        """Return these weights and biases."""
        ...


class FeedForward(nn.Sequential):
    """Position-wise feed-forward network: Linear, activation, dropout, Linear, with optional norms.

    Args:
        shape: shape of the layers.
        places: places of the norms.
        norm: builds the norms.

    Shape:
        - x: (batch, length, features)
        - padding_mask: (batch, length), True = padding
        - output: as x
    """

    def __init__(self, shape: TransformerShape, places: LayerPlaces, norm: NormFactory) -> None:
        hidden = shape.feedforward_features
        dropped = shape.dropout if shape.activation_dropout is None else shape.activation_dropout
        before = norm if places.linears or places.hidden == "before" else None
        first = linear(shape.num_features, hidden, before)
        dropout: nn.Module = Dropout(dropped)
        if places.hidden == "after":
            dropout = Normed(dropout, norm(hidden))
        super().__init__(
            first,
            ACTIVATIONS[shape.activation](),
            dropout,
            linear(hidden, shape.num_features, norm if places.linears else None),
        )

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Apply the network to every position."""
        for part in self:
            x = apply_masked(part, x, padding_mask)
        return x

    def branch_weights(self) -> list[Tensor]:
        """Return the weights and biases of both linear maps, for DeepNorm."""
        maps = [part for part in self if isinstance(part, nn.Linear)]
        return [tensor for part in maps for tensor in (part.weight, part.bias)]


class Residual(nn.Module):
    """Residual connection with norms around a sub-layer f: `N₃(α x + N₂(f(s N₁(x))))`.

    Most placements have only some of these: the norm before the sub-layer or at the sum, `norm`,
    that after it, `branch_norm`, and α, the vector `scale`, learned or constant.

    Args:
        num_features: number of features.
        norm: builds the norms.
        places: places of the norms.
        dropout: dropout of the branch, in training.
    """

    def __init__(
        self,
        num_features: int,
        norm: NormFactory,
        *,
        places: SubLayerPlaces,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.places = places
        self.norm = norm(num_features) if places.before or places.at_sum else None
        self.branch_norm = norm(num_features) if places.after else None
        self.dropout = Dropout(dropout)
        self.scale: Tensor | None
        if places.residual == "learned":
            self.scale = nn.Parameter(torch.ones(num_features))
        elif places.residual == 1:
            self.scale = None
        else:
            self.register_buffer("scale", torch.full((num_features,), float(places.residual)))

    def forward(
        self, x: Tensor, sublayer: Callable[[Tensor], Tensor], padding_mask: Tensor | None = None
    ) -> Tensor:
        """Apply `sublayer` with norms and residual connection; x: (batch, length, features)."""
        inner = self._normalized(x, padding_mask) if self.places.before else x
        branch = sublayer(inner if self.places.scale == 1 else inner * self.places.scale)
        if self.branch_norm is not None:
            branch = self.branch_norm(branch, padding_mask)
        kept = x if self.scale is None else x * self.scale
        total = kept + self.dropout(branch)
        return self._normalized(total, padding_mask) if self.places.at_sum else total

    def _normalized(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        assert self.norm is not None
        normalized: Tensor = self.norm(x, padding_mask)
        return normalized


class SubLayers(nn.Module):
    """Base of layers with an attention and a feed-forward network, each with a residual connection.

    Args:
        attention: self-attention.
        shape: shape of the layers.
        norm: builds the norms.
        places: places of the norms; None is those of the lowest layer.
    """

    def __init__(
        self,
        attention: nn.Module,
        shape: TransformerShape,
        norm: NormFactory,
        *,
        places: LayerPlaces | None = None,
    ) -> None:
        super().__init__()
        places = places or layer_places(shape)[0]
        self.branch_scale = places.branch_scale
        self.attention = attention
        self.attention_frame = attention_frame(shape, places, norm)
        self.feedforward = FeedForward(shape, places, norm)
        self.feedforward_frame = feedforward_frame(shape, places, norm)

    def scale_branches(self) -> None:
        """Multiply the initial weights of the branches by DeepNorm's β."""
        if self.branch_scale != 1:
            scale_branches(self.branch_scale, [self.attention, self.feedforward])

    def _through(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], padding_mask: Tensor | None
    ) -> Tensor:
        x = self.attention_frame(x, attend, padding_mask)
        y: Tensor = self.feedforward_frame(
            x, lambda inner: self.feedforward(inner, padding_mask), padding_mask
        )
        return y


class AttentionLayer(SubLayers):
    """A Transformer layer with an attention whose forward takes `(x, padding_mask=…)`."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the layer's output, (batch, length, features)."""

        def attend(inner: Tensor) -> Tensor:
            attended: Tensor = self.attention(inner, padding_mask=padding_mask)
            return attended

        return self._through(x, attend, padding_mask)


class TransformerLayer(AttentionLayer):
    """A Transformer layer with multi-head attention.

    Args:
        shape: shape of the layers.
        norm: builds the norms.
        causal: whether positions attend only to themselves and earlier ones.
        places: places of the norms; None is those of the lowest layer.
        qk_norm: builds the norms of queries and keys, if the shape has them; None is `norm`.
    """

    def __init__(
        self,
        shape: TransformerShape,
        norm: NormFactory,
        *,
        causal: bool = False,
        places: LayerPlaces | None = None,
        qk_norm: NormFactory | None = None,
    ) -> None:
        places = places or layer_places(shape)[0]
        super().__init__(
            attention(shape, places, norm, causal=causal, qk_norm=qk_norm),
            shape,
            norm,
            places=places,
        )


def attention(
    shape: TransformerShape,
    places: LayerPlaces,
    norm: NormFactory,
    *,
    causal: bool,
    qk_norm: NormFactory | None,
) -> MultiHeadAttention:
    """Return a multi-head attention with its inner norms."""
    kind = shape.qk_norm or ("per_head" if places.heads else None)
    return MultiHeadAttention(
        shape.num_features,
        shape.num_heads,
        dropout=shape.attention_dropout,
        causal=causal,
        scales_heads=places.scales_heads,
        linear_norm=norm if places.linears else None,
        head_norms=None if kind is None else HeadNorms(kind, qk_norm or norm, places.heads),
    )


def attention_frame(shape: TransformerShape, places: LayerPlaces, norm: NormFactory) -> Residual:
    """Return the residual connection of an attention."""
    return Residual(shape.num_features, norm, places=places.attention, dropout=shape.dropout)


def feedforward_frame(shape: TransformerShape, places: LayerPlaces, norm: NormFactory) -> Residual:
    """Return the residual connection of a feed-forward network."""
    return Residual(shape.num_features, norm, places=places.feedforward, dropout=shape.dropout)


@torch.no_grad()
def scale_branches(scale: float, modules: list[nn.Module]) -> None:
    """Scale weights and biases of values, outputs and feed-forward networks, as in DeepNorm.

    Queries, keys and embeddings do not change.
    """
    for module in modules:
        for tensor in cast(Branches, module).branch_weights():
            tensor.mul_(scale)


def final_norm(shape: TransformerShape, norm: NormFactory) -> nn.Module | None:
    """Return the norm after the last layer; None for placements without one."""
    return None if shape.placement in WITHOUT_FINAL_NORM else norm(shape.num_features)


def embedding_norm(shape: TransformerShape, norm: NormFactory) -> nn.Module | None:
    """Return the norm of the embeddings; None if the shape has none."""
    return norm(shape.num_features) if has_embedding_norm(shape) else None


def norms_by_layer(norms: Norms, shape: TransformerShape, upper: Norms | None) -> list[Norms]:
    """Return the norm factory of each layer, the lowest first.

    Args:
        norms: factory for the `num_norm_layers` lowest layers.
        shape: shape with the numbers of layers.
        upper: factory for the layers above them.

    Raises:
        InputError: `num_norm_layers` is out of range, or `upper` is missing.
    """
    num_layers, lowest = shape.num_layers, shape.num_norm_layers
    if lowest is None or lowest == num_layers:
        return [norms] * num_layers
    if upper is None or not 0 <= lowest <= num_layers:
        raise InputError(
            f"num_norm_layers={lowest} of num_layers={num_layers} layers: give 0 to "
            f"{num_layers}, and an upper_norm that builds the norms above them"
        )
    return [norms] * lowest + [upper] * (num_layers - lowest)
