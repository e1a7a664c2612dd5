"""Placements of the norms in a layer, by name."""

from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from powernorm.records import Placement
from powernorm_lab.models.choices import TransformerShape

WITHOUT_FINAL_NORM: Final[frozenset[Placement]] = frozenset({"post", "deepnorm", "bn-linear"})
"""Placements without a norm after the last layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubLayerPlaces:
    """Places of the norms around a sub-layer f: `y = N₃(α x + N₂(f(s N₁(x))))`."""

    before: bool = False
    """N₁, before the sub-layer, on its branch."""
    after: bool = False
    """N₂, after the sub-layer, on its branch."""
    at_sum: bool = False
    """N₃, after the residual sum."""
    residual: float | Literal["learned"] = 1.0
    """α: a constant, or a learned vector, initially 1."""
    scale: float = 1.0
    """s: a constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlaces:
    """Places of the norms in a layer, and scales that belong to the placement."""

    attention: SubLayerPlaces
    """Places around its attentions."""
    feedforward: SubLayerPlaces
    """Places around its feed-forward network."""
    hidden: Literal["before", "after"] | None = None
    """Inside the feed-forward network: before the activation, or after it and its dropout."""
    linears: bool = False
    """After every linear map of the layer."""
    heads: bool = False
    """Inside the attention: on queries, keys and values, in each head."""
    scales_heads: bool = False
    """Whether each head has a learned scale before the output projection."""
    branch_scale: float = 1.0
    """β: factor of the initial weights of the branches, except for queries and keys."""


_PRE: Final = SubLayerPlaces(before=True)
_POST: Final = SubLayerPlaces(at_sum=True)
_BOTH: Final = SubLayerPlaces(before=True, after=True)
_OUT: Final = SubLayerPlaces(after=True)
_NONE: Final = SubLayerPlaces()

_LAYERS: Final[dict[Placement, LayerPlaces]] = {
    "pre": LayerPlaces(attention=_PRE, feedforward=_PRE),
    "post": LayerPlaces(attention=_POST, feedforward=_POST),
    "sandwich": LayerPlaces(attention=_BOTH, feedforward=_BOTH),
    "peri": LayerPlaces(attention=_BOTH, feedforward=_BOTH),
    "out": LayerPlaces(attention=_OUT, feedforward=_OUT),
    "deepnorm": LayerPlaces(attention=_POST, feedforward=_POST),
    "normformer": LayerPlaces(
        attention=_BOTH,
        feedforward=replace(_PRE, residual="learned"),
        hidden="after",
        scales_heads=True,
    ),
    "bn-ffn": LayerPlaces(attention=_PRE, feedforward=_PRE, hidden="before"),
    "bn-linear": LayerPlaces(attention=_NONE, feedforward=_NONE, linears=True),
    # HybridNorm (Zhuo et al. 2025): `z = N(x + f(x))`, then `z + g(z)`; f has norms of its heads.
    "hybrid": LayerPlaces(attention=_POST, feedforward=_NONE, heads=True),
}


class DeepNormScales(NamedTuple):
    """The constants of DeepNorm (Wang et al. 2022, "DeepNet", section 4)."""

    residual: float
    """α."""
    branch: float
    """β."""


def deepnorm_scales(num_layers: int) -> DeepNormScales:
    """Return α = (2L)^¼ and β = (8L)^-¼ for a single stack of L layers.

    >>> [round(scale, 5) for scale in deepnorm_scales(6)]
    [1.86121, 0.37992]
    """
    return DeepNormScales((2 * num_layers) ** 0.25, (8 * num_layers) ** -0.25)


def deepnorm_scales_of_both(
    num_layers: int, num_decoder_layers: int
) -> tuple[DeepNormScales, DeepNormScales]:
    """Return the scales of an encoder with N layers and of its decoder with M layers.

    Encoder α = 0.81 (N⁴M)^(1/16), β = 0.87 (N⁴M)^(-1/16); decoder α = (3M)^¼, β = (12M)^-¼.

    >>> encoder, decoder = deepnorm_scales_of_both(6, 6)
    >>> [round(scale, 4) for scale in (*encoder, *decoder)]
    [1.4179, 0.497, 2.0598, 0.3433]
    """
    depth = (num_layers**4 * num_decoder_layers) ** (1 / 16)
    encoder = DeepNormScales(0.81 * depth, 0.87 / depth)
    return encoder, DeepNormScales(
        (3 * num_decoder_layers) ** 0.25, (12 * num_decoder_layers) ** -0.25
    )


def layer_places(
    shape: TransformerShape,
    *,
    num_layers: int | None = None,
    scales: DeepNormScales | None = None,
) -> list[LayerPlaces]:
    """Return the places of the norms in each layer of a stack, the lowest first.

    Args:
        shape: shape with the placement.
        num_layers: number of layers of the stack; None is that of the shape.
        scales: scales of DeepNorm; None is those of a single stack.
    """
    count = shape.num_layers if num_layers is None else num_layers
    if shape.placement == "mix":
        # The lowest quarter is `post` (Mix-LN's q = 0.25), at least one layer.
        num_post = max(1, count // 4)
        return [_LAYERS["post"]] * num_post + [_LAYERS["pre"]] * (count - num_post)
    if shape.placement == "lns":
        # LayerNorm scaling (Sun et al. 2025): norms of layer l ≥ 1 by 1/√l, except the final norm.
        scaled = [replace(_PRE, scale=layer**-0.5) for layer in range(1, count + 1)]
        return [LayerPlaces(attention=one, feedforward=one) for one in scaled]
    places = _LAYERS[shape.placement]
    if shape.placement == "deepnorm":
        residual, branch = scales or deepnorm_scales(count)
        at_sum = replace(_POST, residual=residual)
        places = replace(places, attention=at_sum, feedforward=at_sum, branch_scale=branch)
    return [places] * count


def has_embedding_norm(shape: TransformerShape) -> bool:
    """Return whether a norm follows the embeddings."""
    return shape.placement == "peri" if shape.embedding_norm is None else shape.embedding_norm
