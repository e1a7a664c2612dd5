"""The parts of a Transformer layer: feed-forward network, residual sub-layer, both together."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.lab.models.attention import MultiHeadAttention
from powernorm.lab.models.choices import Activation, Placement, TransformerShape
from powernorm.lab.models.dropout import Dropout

NormFactory = Callable[[int], nn.Module]
"""Makes the norm of a number of features, whose forward takes `(x, padding_mask)`."""
Norms = TypeVar("Norms")


class Cube(nn.Module):
    """x³ (Chen and Manning 2014)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the third power of each element."""
        return x * x * x


ACTIVATIONS: dict[Activation, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "cube": Cube}


class FeedForward(nn.Sequential):
    """Linear, activation, dropout, Linear, at every position alike.

    Args:
        num_features: size of input and output.
        hidden_features: size in between.
        activation: the non-linearity.
        dropout: after the non-linearity, in training.
    """

    def __init__(
        self,
        num_features: int,
        hidden_features: int,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            nn.Linear(num_features, hidden_features),
            ACTIVATIONS[activation](),
            Dropout(dropout),
            nn.Linear(hidden_features, num_features),
        )


class Residual(nn.Module):
    """The frame of a sub-layer f: `x + f(norm(x))` (pre) or `norm(x + f(x))` (post).

    Args:
        num_features: size of the features.
        norm: makes the norm.
        placement: where the norm stands.
        dropout: of f's output, in training.
    """

    def __init__(
        self, num_features: int, norm: NormFactory, *, placement: Placement, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.placement = placement
        self.norm = norm(num_features)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Tensor, sublayer: Callable[[Tensor], Tensor], padding_mask: Tensor | None = None
    ) -> Tensor:
        """Apply `sublayer` inside the frame; x: (batch, length, features)."""
        if self.placement == "pre":
            branch: Tensor = self.dropout(sublayer(self._normalized(x, padding_mask)))
            return x + branch
        return self._normalized(x + self.dropout(sublayer(x)), padding_mask)

    def _normalized(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        normalized: Tensor = self.norm(x, padding_mask)
        return normalized


class SubLayers(nn.Module):
    """An attention and a feed-forward network, each in its residual frame; how they meet is left.

    Args:
        attention: of positions to each other.
        shape: of the layers.
        norm: makes the norms.
        feedforward_norm: makes the norm of the feed-forward network; None is `norm`.
    """

    def __init__(
        self,
        attention: nn.Module,
        shape: TransformerShape,
        norm: NormFactory,
        *,
        feedforward_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_frame = residual(shape, norm)
        self.feedforward = feedforward(shape)
        self.feedforward_frame = residual(shape, feedforward_norm or norm)

    def _through(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], padding_mask: Tensor | None
    ) -> Tensor:
        x = self.attention_frame(x, attend, padding_mask)
        y: Tensor = self.feedforward_frame(x, self.feedforward, padding_mask)
        return y


class AttentionLayer(SubLayers):
    """The layer of a Transformer around an attention whose forward takes `(x, padding_mask=…)`."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the layer's output, (batch, length, features)."""

        def attend(inner: Tensor) -> Tensor:
            attended: Tensor = self.attention(inner, padding_mask=padding_mask)
            return attended

        return self._through(x, attend, padding_mask)


class TransformerLayer(AttentionLayer):
    """The layer with the usual attention of several heads.

    Args:
        shape: of the layers.
        norm: makes the norms.
        causal: a position sees no later one.
        feedforward_norm: makes the norm of the feed-forward network; None is `norm`.
    """

    def __init__(
        self,
        shape: TransformerShape,
        norm: NormFactory,
        *,
        causal: bool = False,
        feedforward_norm: NormFactory | None = None,
    ) -> None:
        attention = MultiHeadAttention(
            shape.num_features, shape.num_heads, dropout=shape.attention_dropout, causal=causal
        )
        super().__init__(attention, shape, norm, feedforward_norm=feedforward_norm)


def residual(shape: TransformerShape, norm: NormFactory) -> Residual:
    """Return the frame of a sub-layer."""
    return Residual(shape.num_features, norm, placement=shape.placement, dropout=shape.dropout)


def feedforward(shape: TransformerShape) -> FeedForward:
    """Return the feed-forward network of a layer."""
    dropout = shape.dropout if shape.activation_dropout is None else shape.activation_dropout
    return FeedForward(
        shape.num_features,
        shape.feedforward_features,
        activation=shape.activation,
        dropout=dropout,
    )


def final_norm(shape: TransformerShape, norm: NormFactory) -> nn.Module | None:
    """Return the norm after the last layer, which there is with placement `pre`."""
    return norm(shape.num_features) if shape.placement == "pre" else None


def norms_by_layer(norms: Norms, shape: TransformerShape, upper: Norms | None) -> list[Norms]:
    """Return what makes the norms of each layer, the lowest first.

    Args:
        norms: of the `num_norm_layers` lowest layers.
        shape: has the numbers of layers.
        upper: of the layers above them.

    Raises:
        InputError: there are no such layers, or nothing for those above them.
    """
    num_layers, lowest = shape.num_layers, shape.num_norm_layers
    if lowest is None or lowest == num_layers:
        return [norms] * num_layers
    if upper is None or not 0 <= lowest <= num_layers:
        raise InputError(
            f"num_norm_layers={lowest} of num_layers={num_layers} layers: give 0 to "
            f"{num_layers}, and with upper_norm what makes the norms above them."
        )
    return [norms] * lowest + [upper] * (num_layers - lowest)
