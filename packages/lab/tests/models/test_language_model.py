from functools import partial

import pytest
import torch
from lab.tests.task_models import check_causal, check_first_weights, learned
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import NORMS, BatchStatisticsNorm, build_norm
from powernorm_lab.models.choices import Placement, TransformerShape
from powernorm_lab.models.language_model import LanguageModel

VOCABULARY, LENGTH, FEATURES = 11, 9, 8


def build(
    norm: str, *, seed: int = 0, placement: Placement = "pre", dropout: float = 0.0
) -> LanguageModel:
    def make(num_features: int) -> nn.Module:
        return build_norm(norm, num_features)

    return LanguageModel(
        VOCABULARY,
        make,
        TransformerShape(
            num_features=FEATURES,
            num_layers=2,
            num_heads=2,
            feedforward_features=12,
            placement=placement,
            dropout=dropout,
        ),
        max_length=LENGTH,
        seed=seed,
    )


def tokens(batch: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)


def trained(norm: str, placement: Placement) -> LanguageModel:
    return learned(build(norm, placement=placement, dropout=0.1), tokens)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", NORMS)
def test_no_output_depends_on_a_later_token(norm: str, placement: Placement) -> None:
    check_causal(trained(norm, placement), tokens(), VOCABULARY)


@pytest.mark.parametrize("norm", NORMS)
def test_all_norms_start_from_the_same_weights(norm: str) -> None:
    check_first_weights(build, norm, 2 + 2 * 10)


def test_placement_decides_where_norms_stand() -> None:
    def num_norms(placement: Placement) -> int:
        model = build("bn", placement=placement)
        return sum(isinstance(m, BatchStatisticsNorm) for m in model.modules())

    assert num_norms("pre") == 2 * 2 + 1
    assert num_norms("post") == 2 * 2


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_residual_frames_follow_their_equations(placement: Placement) -> None:
    model = build("ln", placement=placement).eval()
    layer = model.layers[0]
    x = torch.randn(2, LENGTH, FEATURES)
    attention, feedforward = layer.attention, layer.feedforward
    norm1, norm2 = layer.attention_frame.norm, layer.feedforward_frame.norm
    if placement == "pre":
        h = x + attention(norm1(x))
        expected = h + feedforward(norm2(h))
    else:
        h = norm1(x + attention(x))
        expected = norm2(h + feedforward(h))
    torch.testing.assert_close(layer(x), expected)


def test_output_is_tied_to_the_embedding() -> None:
    model = build("none")
    logits = model(tokens())
    torch.testing.assert_close(logits, model.features(tokens()) @ model.embedding.weight.T)
    assert sum(p.shape == (VOCABULARY, FEATURES) for p in model.parameters()) == 1


@pytest.mark.parametrize("norm", ["bn", "pn", "ln"])
def test_padding_changes_neither_statistics_nor_valid_outputs(norm: str) -> None:
    x = tokens(batch=2)
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[:, -3:] = True
    garbage = x.clone()
    garbage[:, -3:] = (x[:, -3:] + 1) % VOCABULARY
    short = build(norm)
    expected = short(x[:, :-3])
    for padded in (x, garbage):
        model = build(norm)
        got = model(padded, mask)
        torch.testing.assert_close(got[:, :-3], expected)
        for ours, theirs in zip(model.buffers(), short.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_padding_at_the_start_gives_no_nan() -> None:
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[:, :3] = True
    assert build("bn")(tokens(batch=2), mask).isfinite().all()


def test_every_norm_receives_the_padding_mask() -> None:
    seen: list[Tensor | None] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            seen.append(padding_mask)
            return x

    model = LanguageModel(
        VOCABULARY,
        lambda _: Spy(),
        TransformerShape(num_features=FEATURES, num_heads=2),
        max_length=LENGTH,
    )
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    model(tokens(batch=2), mask)
    assert len(seen) == 5
    assert all(given is mask for given in seen)


def test_bad_shapes_are_named() -> None:
    with pytest.raises(InputError, match="sequence of 10 tokens is longer than max_length=9"):
        build("ln")(torch.zeros(1, LENGTH + 1, dtype=torch.long))
    with pytest.raises(InputError, match="num_heads=3 does not divide num_features=8"):
        LanguageModel(5, nn.LayerNorm, TransformerShape(num_features=8, num_heads=3), max_length=4)


def test_dropout_is_active_in_training_only() -> None:
    model = build("ln", dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_factory_may_carry_options() -> None:
    model = LanguageModel(
        VOCABULARY,
        partial(build_norm, "pn", groups=2, warmup_steps=3),
        TransformerShape(num_features=FEATURES, num_heads=2),
        max_length=LENGTH,
    )
    assert model.final_norm is not None
    assert model.final_norm.warmup_steps == 3
