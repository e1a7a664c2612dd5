"""Base classes of the tasks' sections `model`."""

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
"""Placeholder for a short name: the norm that is compared."""


@section("model")
class ModelSettings:
    """Architecture of the model."""

    @property
    def norm_widths(self) -> tuple[int, ...]:
        """Return the numbers of features of the model's norms."""
        return ()


@section("model")
class TransformerSettings(ModelSettings):
    """Architecture of a Transformer."""

    num_features: Positive = 128
    """C, the size of the residual stream."""
    num_layers: Positive = 2
    """Number of layers; in translation, of the encoder."""
    num_heads: Positive = 4
    """Number of attention heads."""
    feedforward_features: Positive = 512
    """Hidden features of a feed-forward network."""
    dropout: FractionBelowOne = 0.0
    """Dropout of the embeddings and of every sub-layer's output."""
    activation: Activation = "gelu"
    """Activation of the feed-forward networks."""
    placement: Placement = "pre"
    """Placement of the norms: before each sub-layer, on its branch (`pre`), after the residual sum
    (`post`), before and after each sub-layer (`sandwich`), there and on the embeddings (`peri`),
    after each sub-layer (`out`); `mix` has `post` in the lowest quarter of the layers and `pre`
    above; `deepnorm`, `normformer`; `bn-ffn` is `pre` with one more norm between the linear maps of
    a feed-forward network, `bn-linear` with one after every linear map; `lns` is `pre` with the
    norms of layer l, from 1, times 1/√l; `hybrid` has norms of queries, keys and values, and one
    before the feed-forward network and its residual."""
    embedding_norm: bool | None = None
    """Whether a norm follows the embeddings; none means with `peri` only."""
    qk_norm: QueryKeyNorm | None = None
    """Features that norms of queries and keys normalize: those of each head, by one norm for all
    heads (`per_head`), or those of all heads (`whole`); none has no such norms."""
    qk_norm_type: str = "rms"
    """Short name of the norms of queries and keys; `same` is the norm that is compared."""
    num_norm_layers: NotNegative | None = None
    """Number of lowest layers that have the norm; the layers above and the final norm have
    LayerNorm with its defaults. None, or all layers, puts the norm everywhere."""

    @property
    def norm_widths(self) -> tuple[int, ...]:
        """Return the numbers of features of all norms except qk-norms of another type."""
        widths = [self.num_features]
        for places in layer_places(self.shape):
            if places.linears or places.hidden:
                widths.append(self.feedforward_features)
            if places.linears:
                widths.append(2 * self.num_features)  # keys and values
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
        """Return the shape of the model's layers, from the settings of the same names."""
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
                "has no effect without norms of queries and keys: set model.qk_norm to per_head or "
                "whole, or leave it out",
            )

    def _refuse_inner(self, attention: str, *placements: Placement) -> None:
        """Refuse placements with norms or scales inside an attention that cannot have them.

        Args:
            attention: description of the attention for the message.
            placements: placements that do not fit it; neither does qk-norm.
        """
        if self.placement in placements:
            raise refuse(
                "model.placement",
                self.placement,
                "has norms or scales inside the attention, which is not possible in "
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
    """Architecture of a Transformer, with separate dropouts and its initialization."""

    attention_dropout: FractionBelowOne = 0.0
    """Dropout of the attention weights."""
    activation_dropout: FractionBelowOne | None = None
    """Dropout after the activation of the feed-forward networks; none is `dropout`."""
    initialization: Initialization = "xavier"
    """Initialization of linear maps; Xu et al. 2019 recommend `kaiming` for AdaNorm."""
