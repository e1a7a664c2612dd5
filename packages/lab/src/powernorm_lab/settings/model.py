"""What the sections `model` of the tasks are made of."""

from dataclasses import fields
from typing import Final

from powernorm_lab.models.choices import (
    Activation,
    Initialization,
    Placement,
    QueryKeyNorm,
    TransformerShape,
)
from powernorm_lab.models.placements import layer_places
from powernorm_lab.settings.section import (
    FractionBelowOne,
    NotNegative,
    Positive,
    is_default,
    refuse,
    section,
)

SAME: Final = "same"
"""In place of a short name: the norm that is compared."""


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
    """Where the norms stand: before each sub-layer, on its branch (`pre`), after the residual sum
    (`post`), before and after each sub-layer (`sandwich`), there and on the embeddings (`peri`),
    after it alone (`out`); `mix` has `post` in the lowest quarter of the layers and `pre` above;
    `deepnorm`, `normformer`; `bn-ffn` is `pre` with one more between the linear maps of a
    feed-forward network, `bn-linear` one after every linear map; `lns` is `pre` with the norms of
    layer l, from 1, times 1/√l; `hybrid` has norms of queries, keys and values, and one before the
    feed-forward network and its residual."""
    embedding_norm: bool | None = None
    """Whether a norm follows the embeddings; none is with `peri` only."""
    qk_norm: QueryKeyNorm | None = None
    """What norms of queries and keys look at: the features of each head, by one norm for all heads
    (`per_head`), or those of all heads (`whole`); none has no such norms."""
    qk_norm_type: str = "rms"
    """Short name of these norms; `same` is the norm that is compared."""
    num_norm_layers: NotNegative | None = None
    """Lowest layers that have the norm; those above have LayerNorm with its defaults, and so has
    the final norm. None, or all layers, gives every place the norm."""

    @property
    def norm_widths(self) -> tuple[int, ...]:
        """Return the numbers of features of the norms, but for qk-norms of a type of their own."""
        widths = [self.num_features]
        for places in layer_places(self.shape):
            if places.linears or places.hidden:
                widths.append(self.feedforward_features)
            if places.linears:
                widths.append(2 * self.num_features)  # of keys and values
            if places.heads and self.qk_norm is None:
                widths.append(self.qk_norm_width)
        if self.qk_norm is not None and self.qk_norm_type == SAME:
            widths.append(self.qk_norm_width)
        return tuple(dict.fromkeys(widths))

    @property
    def qk_norm_width(self) -> int:
        """Return the number of features of a norm of queries or keys."""
        whole = self.qk_norm == "whole"
        return self.num_features if whole else self.num_features // self.num_heads

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
        if self.qk_norm is None and not is_default(self, "qk_norm_type"):
            raise refuse(
                "model.qk_norm_type",
                self.qk_norm_type,
                "means nothing without norms of queries and keys: set model.qk_norm to per_head or "
                "whole, or leave it out",
            )

    def _refuse_inner(self, attention: str, *placements: Placement) -> None:
        """Refuse placements with norms or scales inside an attention that has no place for them.

        Args:
            attention: what it is, in words.
            placements: that do not fit it; neither does qk-norm.
        """
        if self.placement in placements:
            raise refuse(
                "model.placement",
                self.placement,
                "has norms or scales inside the attention, and they have no place in "
                f"{attention}: choose another placement",
            )
        if self.qk_norm is not None:
            raise refuse(
                "model.qk_norm",
                self.qk_norm,
                f"does not fit {attention}: set model.qk_norm=none",
            )

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
