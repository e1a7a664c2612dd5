"""Operators that norms fold through or into, at other sizes than the example's too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from surgery.folding.test_folding_graphs import C, Net, bn, linear, tokens
from surgery.static_models import left_of, settle


def unshifted(norm: nn.Module) -> nn.Module:
    """The norm with a scale only."""
    settle(norm)
    with torch.no_grad():
        norm.running_mean.zero_()
        norm.bias.zero_()
    norm.is_prepared = True
    return norm


def channels(size: int = C) -> nn.Module:
    return powernorm.BatchNorm(size, feature_dim=1, dtype=torch.float64)


def images(*size: int) -> Tensor:
    return torch.randn(2, C, *(size or (6, 6)), dtype=torch.float64)


def conv(groups: int = 1, out: int = 2 * C, bias: bool = True, **options: int) -> nn.Conv2d:
    return nn.Conv2d(C, out, 3, groups=groups, bias=bias, dtype=torch.float64, **options)


def check(model: nn.Module, x: Tensor, *others: Tensor) -> str:
    """Fold the only norm; the outputs are those from before, also for inputs of other sizes."""
    settle(model)
    inputs = (x, *others)
    expected = [model(one).detach() for one in inputs]
    (row,) = powernorm.fold(model, x).rows
    for one, before in zip(inputs, expected, strict=True):
        assert (model(one).detach() - before).abs().max() <= 1e-12 * before.abs().max()
    assert bool(row.reason) == (left_of(row) != "fold")
    return left_of(row)


# Convolutions in groups: each row reads the channels of its own group.


@pytest.mark.thinned(1)
@pytest.mark.parametrize("groups", [1, 2, 3, C])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [C, 2 * C])
def test_in_front_of_a_grouped_convolution(groups: int, bias: bool, out: int) -> None:
    model = nn.Sequential(nn.Tanh(), channels(), conv(groups, out, bias), nn.GELU())
    assert check(model, images(), images(5, 9)) == "fold"


@pytest.mark.parametrize("groups", [2, C])
def test_behind_a_grouped_convolution(groups: int) -> None:
    model = nn.Sequential(nn.Tanh(), conv(groups, C, False, padding=1), channels(), nn.GELU())
    assert check(model, images(), images(5, 9)) == "fold"


def test_depthwise_in_one_dimension() -> None:
    norm = settle(powernorm.BatchNorm(C, feature_dim=1, dtype=torch.float64))
    depthwise = nn.Conv1d(C, C, 3, groups=C, dtype=torch.float64)
    model = nn.Sequential(nn.Tanh(), norm, depthwise, nn.SiLU())
    assert check(model, images(7), images(9)) == "fold"


@pytest.mark.parametrize(
    ("norm", "left"), [(channels, "multiply-add"), (lambda: unshifted(channels()), "fold")]
)
def test_zero_padding_in_front_of_a_depthwise_convolution(
    norm: Callable[[], nn.Module], left: str
) -> None:
    model = nn.Sequential(nn.Tanh(), norm(), conv(C, C, padding=1), nn.GELU())
    assert check(model, images(), images(5, 9)) == left


# Padding, whose widths may come from a shape, as in Swin.


def _to_multiple(m: Net, x: Tensor) -> Tensor:
    extra = -x.shape[1] % 4
    y = F.pad(m.n(torch.tanh(x)), (0, 0, 0, extra))
    return m.a(y)[:, : x.shape[1]] + m.a(y).mean(1, keepdim=True)


def test_padding_of_no_width_pads_other_sizes() -> None:
    """A shift must not pass: where another size is padded, its zeros are not the norm's."""
    for norm, left in ((unshifted(bn()), "fold"), (bn(), "multiply-add")):
        model = Net(_to_multiple, n=norm, a=linear())
        assert check(model, tokens(2, 8, C), tokens(2, 5, C)) == left


@pytest.mark.parametrize(
    ("pad", "left"),
    [
        (lambda y: F.pad(y, (1, 2, 0, 1)), "multiply-add"),
        (lambda y: F.pad(y, (1, 2), value=1.0), "multiply-add"),
        (lambda y: F.pad(y, (0, 0, 0, 0, 1, 0)), "multiply-add"),
        (lambda y: F.pad(y, (1, 2, 0, 1), mode="reflect"), "fold"),
        (lambda y: F.pad(y, (1, 1, 1, 1), mode="circular"), "fold"),
        (lambda y: F.pad(y, (1, 1, 1, 1), mode="replicate"), "fold"),
    ],
)
def test_padding(pad: Callable[[Tensor], Tensor], left: str) -> None:
    convolution = nn.LazyConv2d(4, 2, dtype=torch.float64)
    convolution(pad(images()))
    model = Net(lambda m, x: m.a(pad(m.n(torch.tanh(x)))), n=channels(), a=convolution)
    assert check(model, images(), images(5, 7)) == left


# Pooling and resizing.


@pytest.mark.parametrize(
    ("pool", "left"),
    [
        (nn.AvgPool2d(2), "fold"),
        (nn.AvgPool2d(3, 2, ceil_mode=True), "fold"),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False), "fold"),
        (nn.AvgPool2d(3, 2, 1), "multiply-add"),
        (nn.AvgPool2d(2, divisor_override=3), "multiply-add"),
        (nn.AdaptiveAvgPool2d(1), "fold"),
        (nn.AdaptiveAvgPool2d((2, 3)), "fold"),
        (nn.Upsample(scale_factor=2), "fold"),
        (nn.Upsample(scale_factor=2, mode="bilinear"), "fold"),
        (nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True), "fold"),
        # A negative scale would turn the largest value into the smallest.
        (nn.MaxPool2d(2), "multiply-add"),
    ],
)
def test_pooling(pool: nn.Module, left: str) -> None:
    model = nn.Sequential(nn.Tanh(), channels(), pool, nn.Conv2d(C, 3, 1, dtype=torch.float64))
    assert check(model, images(), images(5, 9)) == left


@pytest.mark.parametrize("pool", [nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(2)])
def test_pooling_over_the_features(pool: nn.Module) -> None:
    model = nn.Sequential(nn.Tanh(), bn(), pool, nn.Tanh())
    assert check(model, tokens()) == "multiply-add"


# Masks that were expanded to the features, as in the pooling of sentence-transformers.


def _masked_mean(m: Net, x: Tensor) -> Tensor:
    y = m.n(torch.tanh(x))
    mask = (x[..., 0] > 0).unsqueeze(-1).expand(y.size()).to(y.dtype)
    count = torch.clamp(mask.sum(1), min=1e-9)
    return m.a((y * mask).sum(1) / count)


def _features_masked(m: Net, x: Tensor) -> Tensor:
    """A mask of one value per feature is none of one per token, even with the same shape."""
    y = m.n(torch.tanh(x))
    return m.a(y * (x > 0).to(y.dtype))


def _one_token(m: Net, x: Tensor) -> Tensor:
    index = (x[..., 0] > 0).int().argmax(1)[:, None, None].expand(-1, 1, C)
    return m.a(torch.cat([torch.gather(m.n(torch.tanh(x)), 1, index)], -1))


def _token_by_feature(m: Net, x: Tensor) -> Tensor:
    return m.a(torch.gather(m.n(torch.tanh(x)), 1, (x[:, :1] > 0).long()))


def _features_shuffled(m: Net, x: Tensor) -> Tensor:
    return m.a(torch.gather(m.n(torch.tanh(x)), 2, (x > 0).long()))


@pytest.mark.parametrize(
    ("run", "left"),
    [
        (_masked_mean, "fold"),
        (_features_masked, "multiply-add"),
        (_one_token, "fold"),
        (_token_by_feature, "multiply-add"),
        (_features_shuffled, "multiply-add"),
    ],
)
def test_expanded_masks(run: Callable[[Net, Tensor], Tensor], left: str) -> None:
    model = Net(run, n=unshifted(bn()), a=linear())
    assert check(model, tokens(), tokens(3, 7, C)) == left


# Products with parameters that are no Linear.


class Heads(nn.Module):
    """Attention with parameters of three dimensions, as XLNet's."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.q, self.o = (nn.Parameter(torch.randn(C, 2, 3, dtype=torch.float64)) for _ in "qo")

    def forward(self, x: Tensor) -> Tensor:
        if self.turned:
            heads = torch.einsum("hnd,ibh->ibnd", self.q, x)
        else:
            heads = torch.einsum("ibh,hnd->ibnd", x, self.q)
        return torch.einsum("ibnd,hnd->ibh", torch.tanh(heads), self.o)


@pytest.mark.parametrize("turned", [True, False])
def test_einsum(turned: bool) -> None:
    heads = Heads(turned)
    model = Net(lambda m, x: m.h(m.n(torch.tanh(x))), n=unshifted(bn()), h=heads)
    assert check(model, tokens(), tokens(3, 7, C)) == "fold"
    model = Net(lambda m, x: torch.tanh(m.n(m.h(torch.tanh(x)))), n=unshifted(bn()), h=heads)
    assert check(model, tokens(), tokens(3, 7, C)) == "fold"


def test_einsum_has_no_place_for_a_shift() -> None:
    model = Net(lambda m, x: m.h(m.n(torch.tanh(x))), n=bn(), h=Heads(False))
    assert check(model, tokens()) == "multiply-add"


def test_einsum_with_a_diagonal() -> None:
    weight = nn.Linear(C, C, bias=False, dtype=torch.float64)
    model = Net(
        lambda m, x: torch.einsum("bic,cc->bic", m.n(torch.tanh(x)), m.w.weight),
        n=bn(),
        w=weight,
    )
    assert check(model, tokens()) == "multiply-add"


class Product(nn.Linear):
    """As Falcon's."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Doubled(nn.Linear):
    """A bias would be added once, and the rest comes twice."""

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * (x @ self.weight.T)
        return y if self.bias is None else y + self.bias


class Biasless(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize(
    ("kind", "bias", "left"),
    [
        (Product, True, "fold"),
        (Product, False, "fold"),
        (Doubled, False, "multiply-add"),
        (Biasless, False, "multiply-add"),
    ],
)
def test_linear_layers_with_a_forward_of_their_own(
    kind: type[nn.Linear], bias: bool, left: str
) -> None:
    model = nn.Sequential(nn.Tanh(), bn(), kind(C, C, bias=bias, dtype=torch.float64))
    assert check(model, tokens(), tokens(3, 7, C)) == left


# Statistics that are frozen, or have lost their counter.


class FrozenBatchNorm2d(nn.Module):
    """As torchvision's and those of DETR and its relatives."""

    def __init__(self, activation: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.activation = activation
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(C, dtype=torch.float64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        y = x * scale[:, None, None] + shift[:, None, None]
        return y if self.activation is None else self.activation(y)


def test_frozen_statistics() -> None:
    norm = FrozenBatchNorm2d()
    model = nn.Sequential(conv(out=C, bias=False), norm, nn.ReLU())
    assert check(model, images(), images(5, 9)) == "fold"
    assert norm not in list(model)
    model = nn.Sequential(nn.Tanh(), norm, nn.Tanh())
    assert check(model, images()) == "multiply-add"


def test_frozen_statistics_with_more_behind_them() -> None:
    model = nn.Sequential(conv(out=C), FrozenBatchNorm2d(torch.relu), conv(), channels(2 * C))
    rows = powernorm.plan_fold(settle(model).eval(), images()).rows
    assert [row.action for row in rows] == ["keep", "fold"]


def test_pretrained_statistics_without_a_counter() -> None:
    """Checkpoints from before the counter leave it at 0."""
    norm = nn.BatchNorm2d(C, dtype=torch.float64)
    model = nn.Sequential(conv(out=C), norm, nn.ReLU()).eval()
    with pytest.raises(InputError, match=r"'1' \(BatchNorm2d\) have never seen a batch"):
        powernorm.fold(model, images())
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)
    assert check(model, images()) == "fold"
