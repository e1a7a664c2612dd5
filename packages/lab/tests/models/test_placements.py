"""Each placement follows its equation and its paper's initialization."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from lab.tests.tiny_models import (
    FEATURES,
    HEADS,
    LENGTH,
    VOCABULARY,
    check_causal,
    language_model,
    padding,
    tokens,
)
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import BatchNorm, BatchStatisticsNorm, Norm
from powernorm_lab.models.attention import MultiHeadAttention
from powernorm_lab.models.choices import Placement, QueryKeyNorm, TransformerShape
from powernorm_lab.models.placements import deepnorm_scales, deepnorm_scales_of_both
from powernorm_lab.runs import PLACEMENTS
from powernorm_lab.tasks.lm.model import LanguageModel

NEW = [placement for placement in PLACEMENTS if placement not in ("pre", "post")]
QK_NORMS: tuple[QueryKeyNorm, ...] = get_args(QueryKeyNorm)


build = partial(language_model, activation="gelu")


def shaken(model: LanguageModel) -> LanguageModel:
    """Set weights of norms and scales to values other than their initial ones."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def linears(attention: Any) -> Any:
    """Return a naive attention with a norm after each linear map."""

    def forward(x: Tensor) -> Tensor:
        query, rest = attention.query(x), attention.key_value(x)
        keys, values = rest.chunk(2, dim=-1)
        heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (query, keys, values)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return attention.output(mixed.transpose(1, 2).flatten(2))

    return forward


def qkv_normalized(attention: Any) -> Any:
    """Return a naive attention with norms of each head's queries, keys and values."""

    def forward(x: Tensor) -> Tensor:
        parts = (attention.query(x), *attention.key_value(x).chunk(2, dim=-1))
        norms = (attention.query_norm, attention.key_norm, attention.value_norm)
        heads = [
            F.layer_norm(part.unflatten(-1, (HEADS, -1)), (4,), one.norm.weight, one.norm.bias)
            for part, one in zip(parts, norms, strict=True)
        ]
        mixed = F.scaled_dot_product_attention(
            *(one.transpose(1, 2) for one in heads), is_causal=True
        )
        return attention.output(mixed.transpose(1, 2).flatten(2))

    return forward


def expected(layer: Any, x: Tensor, placement: Placement, number: int) -> Tensor:
    """Compute the output of a layer by the equation of its placement."""
    a, f = layer.attention, layer.feedforward
    first, second = layer.attention_frame, layer.feedforward_frame
    if placement == "mix":
        placement = "post" if number == 0 else "pre"
    if placement in ("sandwich", "peri"):
        h = x + first.branch_norm(a(first.norm(x)))
        return h + second.branch_norm(f(second.norm(h)))
    if placement == "out":
        h = x + first.branch_norm(a(x))
        return h + second.branch_norm(f(h))
    if placement in ("post", "deepnorm"):
        alpha = 4**0.25 if placement == "deepnorm" else 1.0
        h = first.norm(alpha * x + a(x))
        return second.norm(alpha * h + f(h))
    if placement == "normformer":
        h = x + first.branch_norm(a(first.norm(x)))
        inner = f[2].norm(F.gelu(f[0](second.norm(h))))
        return second.scale * h + f[3](inner)
    if placement == "bn-ffn":
        h = x + a(first.norm(x))
        return h + f[3](F.gelu(f[0].norm(f[0].inner(second.norm(h)))))
    if placement == "bn-linear":
        h = x + linears(a)(x)
        return h + f[3].norm(f[3].inner(F.gelu(f[0].norm(f[0].inner(h)))))
    if placement == "hybrid":
        z = first.norm(x + qkv_normalized(a)(x))
        return z + f(z)
    scale = (number + 1) ** -0.5 if placement == "lns" else 1.0
    h = x + a(scale * first.norm(x))
    return h + f(scale * second.norm(h))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_layers_follow_their_equations(placement: Placement) -> None:
    model = shaken(build(placement=placement))
    x = torch.randn(2, LENGTH, FEATURES)
    for number, layer in enumerate(model.layers):
        torch.testing.assert_close(layer(x), expected(layer, x, placement, number))


NUM_NORMS = {
    "pre": 5,
    "post": 4,
    "sandwich": 9,
    "peri": 10,
    "out": 5,
    "mix": 5,
    "deepnorm": 4,
    "normformer": 2 * 4 + 1,
    "bn-ffn": 2 * 3 + 1,
    "bn-linear": 2 * 5,
    "lns": 5,
    "hybrid": 2 * 4 + 1,
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_norm_stands_where_it_should_and_sees_the_mask(placement: Placement) -> None:
    model = build("bn", placement=placement)
    mask = padding(4, LENGTH, LENGTH)
    seen: list[Tensor | None] = []
    norms = [module for module in model.modules() if isinstance(module, BatchStatisticsNorm)]
    for norm in norms:
        norm.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    model(tokens(), mask)
    assert len(norms) == len(seen) == NUM_NORMS[placement]
    # Norms of heads get the mask for each head.
    own = [one if one is None or one.ndim == 2 else one[..., 0] for one in seen]
    assert all(one is not None and torch.equal(one, mask) for one in own)


@pytest.mark.parametrize("placement", NEW)
def test_no_output_depends_on_a_later_token(placement: Placement) -> None:
    check_causal(shaken(build("bn", placement=placement)), tokens())


@pytest.mark.parametrize("placement", [one for one in NEW if one != "deepnorm"])
def test_norms_share_their_initial_weights_with_pre_norm(placement: Placement) -> None:
    """A placement changes no other initial weights: matrices are drawn in the same order."""

    def matrices(model: LanguageModel) -> list[Tensor]:
        return [parameter for parameter in model.parameters() if parameter.ndim == 2]

    reference, ours = (
        matrices(build(placement="pre", seed=4)),
        matrices(build(placement=placement, seed=4)),
    )
    assert all(torch.equal(a, b) for a, b in zip(reference, ours, strict=True))


def test_mix_is_post_norm_in_the_lowest_layers() -> None:
    def is_post(num_layers: int) -> list[bool]:
        model = build(placement="mix", num_layers=num_layers)
        return [layer.attention_frame.places.at_sum for layer in model.layers]

    assert is_post(12) == [True] * 3 + [False] * 9
    assert is_post(11) == [True] * 2 + [False] * 9
    assert is_post(2) == [True, False]
    assert build(placement="mix").final_norm is not None


def test_deepnorm_begins_with_smaller_branches() -> None:
    """Values, outputs and feed-forward networks are scaled by β, unlike queries and embeddings."""
    deep, plain = (build(placement=one, num_layers=3) for one in ("deepnorm", "post"))
    alpha, beta = deepnorm_scales(3)
    torch.testing.assert_close(deep.layers[1].attention_frame.scale, torch.full((FEATURES,), alpha))
    for (name, ours), theirs in zip(deep.named_parameters(), plain.parameters(), strict=True):
        if "key_value.weight" in name:
            assert torch.equal(ours[:FEATURES], theirs[:FEATURES])
            torch.testing.assert_close(ours[FEATURES:], beta * theirs[FEATURES:])
        elif "output.weight" in name or "feedforward.0.w" in name or "feedforward.3.w" in name:
            torch.testing.assert_close(ours, beta * theirs)
        else:
            assert torch.equal(ours, theirs), name


def test_deepnorm_scales_an_encoder_by_its_decoder() -> None:
    """For N = M = 6 the scale is 0.81 · 7776^(1/16) = 0.81 · 1.75053."""
    (alpha, beta), decoder = deepnorm_scales_of_both(6, 6)
    assert alpha == pytest.approx(1.41793, abs=1e-5)
    assert beta == pytest.approx(0.49699, abs=1e-5)
    assert decoder == pytest.approx((18**0.25, 72**-0.25))


def test_normformer_scales_heads() -> None:
    """It scales each head before the output projection, and the feed-forward network's residual."""
    model = build(placement="normformer").eval()
    x = torch.randn(2, LENGTH, FEATURES)
    layer: Any = model.layers[0]
    attention, frame = layer.attention, layer.attention_frame
    plain = build().eval().layers[0].attention
    plain.load_state_dict(attention.state_dict(), strict=False)
    torch.nn.init.constant_(attention.head_scale.weight, 3.0)
    branch: list[Tensor] = []
    frame.branch_norm.register_forward_pre_hook(lambda _, args: branch.append(args[0]))
    layer(x)
    attended = plain(frame.norm(x)) - plain.output.bias
    torch.testing.assert_close(branch[0], 3 * attended + plain.output.bias)
    assert layer.feedforward_frame.scale is not None


def test_an_embedding_norm_can_be_chosen() -> None:
    assert build(placement="peri").embedding_norm is not None
    assert build(placement="peri", embedding_norm=False).embedding_norm is None
    assert build().embedding_norm is None
    assert build(embedding_norm=True).embedding_norm is not None


@pytest.mark.parametrize("kind", QK_NORMS)
def test_queries_and_keys_are_normalized(kind: QueryKeyNorm) -> None:
    model = build("rms", qk_norm=kind).eval()
    attention: Any = model.layers[0].attention
    width = FEATURES if kind == "whole" else FEATURES // HEADS
    with torch.no_grad():
        for one in (attention.query_norm, attention.key_norm):
            assert one.norm.num_features == width
            one.norm.weight.copy_(torch.linspace(0.5, 1.5, width))
    x = torch.randn(2, LENGTH, FEATURES)

    def heads(y: Tensor, norm: Norm | None = None) -> Tensor:
        split = y.unflatten(-1, (HEADS, -1))
        if norm is not None and kind == "whole":
            split = norm(y).unflatten(-1, (HEADS, -1))
        elif norm is not None:
            split = norm(split)
        return split.transpose(1, 2)

    keys, values = attention.key_value(x).chunk(2, dim=-1)
    mixed = F.scaled_dot_product_attention(
        heads(attention.query(x), attention.query_norm.norm),
        heads(keys, attention.key_norm.norm),
        heads(values),
        is_causal=True,
    )
    torch.testing.assert_close(attention(x), attention.output(mixed.transpose(1, 2).flatten(2)))


def test_output_is_tied_to_the_embedding() -> None:
    model = build("none")
    logits = model(tokens())
    torch.testing.assert_close(logits, model.features(tokens()) @ model.embedding.weight.T)
    assert sum(p.shape == (VOCABULARY, FEATURES) for p in model.parameters()) == 1


def test_padding_at_the_start_gives_no_nan() -> None:
    mask = ~padding(3, 3, length=LENGTH)
    assert build("bn")(tokens(2), mask).isfinite().all()


def test_an_attention_of_its_own_has_no_place_for_inner_norms() -> None:
    def build_own(**shape: Any) -> LanguageModel:
        return LanguageModel(
            VOCABULARY,
            BatchNorm,
            TransformerShape(num_features=FEATURES, num_heads=HEADS, **shape),
            max_length=LENGTH,
            attention=lambda: MultiHeadAttention(FEATURES, HEADS, causal=True),
        )

    assert isinstance(build_own(placement="sandwich"), nn.Module)
    for shape in ({"placement": "bn-linear"}, {"placement": "normformer"}, {"qk_norm": "whole"}):
        with pytest.raises(InputError, match="no place for norms"):
            build_own(**shape)
