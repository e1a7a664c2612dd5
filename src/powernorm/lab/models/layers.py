"""The parts of a Transformer layer: feed-forward network, residual sub-layer, both together."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from powernorm.lab.models.attention import MultiHeadAttention
from powernorm.lab.models.choices import Activation, Placement
from powernorm.lab.models.dropout import Dropout

NormFactory = Callable[[int], nn.Module]
"""Makes the norm of a number of features, whose forward takes `(x, padding_mask)`."""


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
            branch: Tensor = self.dropout(sublayer(self._normalised(x, padding_mask)))
            return x + branch
        return self._normalised(x + self.dropout(sublayer(x)), padding_mask)

    def _normalised(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        normalised: Tensor = self.norm(x, padding_mask)
        return normalised


class SubLayers(nn.Module):
    """An attention and a feed-forward network, each in its residual frame; how they meet is left.

    Args:
        attention: of positions to each other.
        num_features: size of the features.
        feedforward_features: size inside the feed-forward network.
        norm: makes the norms.
        placement: where the norms stand.
        activation: of the feed-forward network.
        dropout: after both sub-layers, in training.
        activation_dropout: after the activation, in training; None is `dropout`.
        feedforward_norm: makes the norm of the feed-forward network; None is `norm`.
    """

    def __init__(
        self,
        attention: nn.Module,
        num_features: int,
        feedforward_features: int,
        norm: NormFactory,
        *,
        placement: Placement,
        activation: Activation,
        dropout: float = 0.0,
        activation_dropout: float | None = None,
        feedforward_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_frame = Residual(num_features, norm, placement=placement, dropout=dropout)
        self.feedforward = FeedForward(
            num_features,
            feedforward_features,
            activation=activation,
            dropout=dropout if activation_dropout is None else activation_dropout,
        )
        self.feedforward_frame = Residual(
            num_features, feedforward_norm or norm, placement=placement, dropout=dropout
        )

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
        num_features: size of the features.
        num_heads: heads of the attention.
        feedforward_features: size inside the feed-forward network.
        norm: makes the norms.
        placement: where the norms stand.
        activation: of the feed-forward network.
        dropout: after both sub-layers, in training.
        causal: a position sees no later one.
        attention_dropout: of the attention weights, in training.
        activation_dropout: after the activation, in training; None is `dropout`.
        feedforward_norm: makes the norm of the feed-forward network; None is `norm`.
    """

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        feedforward_features: int,
        norm: NormFactory,
        *,
        placement: Placement = "pre",
        activation: Activation = "gelu",
        dropout: float = 0.0,
        causal: bool = False,
        attention_dropout: float = 0.0,
        activation_dropout: float | None = None,
        feedforward_norm: NormFactory | None = None,
    ) -> None:
        super().__init__(
            MultiHeadAttention(num_features, num_heads, dropout=attention_dropout, causal=causal),
            num_features,
            feedforward_features,
            norm,
            placement=placement,
            activation=activation,
            dropout=dropout,
            activation_dropout=activation_dropout,
            feedforward_norm=feedforward_norm,
        )


class LayerStack(nn.Module):
    """The layers of an encoder or a decoder, and the norm after the last of them.

    Args:
        layers: the lowest first.
        norm: after them, with placement `pre`.
    """

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm
