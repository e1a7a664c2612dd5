"""What the sections `model` of the tasks are made of."""

from dataclasses import fields

from powernorm.lab.models.choices import (
    Activation,
    Initialization,
    Placement,
    TransformerShape,
)
from powernorm.lab.settings.section import FractionBelowOne, NotNegative, Positive, refuse, section


@section("model")
class ModelSettings:
    """The shape of the model."""

    @property
    def norm_widths(self) -> tuple[int, ...]:
        """Return the numbers of features that the model has norms of."""
        return ()


@section("model")
class TransformerSettings(ModelSettings):
    """The shape of a Transformer."""

    num_features: Positive = 128
    """C, the size of the residual stream."""
    num_layers: Positive = 2
    """Layers, of a translation those of the encoder."""
    num_heads: Positive = 4
    """Attention heads."""
    feedforward_features: Positive = 512
    """Features between the two maps of a feed-forward network."""
    dropout: FractionBelowOne = 0.0
    """Of embeddings and of what every sub-layer adds."""
    activation: Activation = "gelu"
    """Of the feed-forward networks."""
    placement: Placement = "pre"
    """Where the norms stand: before a sub-layer, on its branch, or after the residual sum."""
    num_norm_layers: NotNegative | None = None
    """Lowest layers that have the norm; those above have LayerNorm with its defaults, and so has
    the final norm. None, or all layers, gives every place the norm."""

    @property
    def norm_widths(self) -> tuple[int, ...]:
        """Return the one number of features that the model has norms of."""
        return (self.num_features,)

    @property
    def shape(self) -> TransformerShape:
        """Return what the model's layers are made of: the settings that have its names."""
        names = [item.name for item in fields(TransformerShape) if hasattr(self, item.name)]
        return TransformerShape(**{name: getattr(self, name) for name in names})

    def __post_init__(self) -> None:
        if self.num_norm_layers is not None and self.num_norm_layers > self.num_layers:
            raise refuse(
                "model.num_norm_layers",
                self.num_norm_layers,
                f"does not fit model.num_layers={self.num_layers}: give 0 to {self.num_layers}, or "
                "none for all",
            )
        self._check_heads()

    def _check_heads(self) -> None:
        if self.num_features % self.num_heads:
            raise refuse(
                "model.num_heads",
                self.num_heads,
                f"does not divide model.num_features={self.num_features}: choose a divisor",
            )


@section("model")
class DetailedTransformerSettings(TransformerSettings):
    """The shape of a Transformer with dropouts of its parts, and how it begins."""

    attention_dropout: FractionBelowOne = 0.0
    """Of the attention weights."""
    activation_dropout: FractionBelowOne | None = None
    """After the activation of the feed-forward networks; none is `dropout`."""
    initialization: Initialization = "xavier"
    """How linear maps begin; Xu et al. 2019 recommend `kaiming` for AdaNorm."""
