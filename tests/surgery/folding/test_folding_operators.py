"""Operators that norms fold through or into, at other sizes than the example's too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
from refusals import refuses
from surgery.folding.test_folding_graphs import C, Net, Together, bn, linear, tokens
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


def check(models: Mapping[str, nn.Module], x: Tensor, *others: Tensor) -> dict[str, str]:
    """Fold models of one norm each, traced as one, and return what is left of the norms.

    The outputs are those from before, also for inputs of other sizes.
    """
    together = settle(Together(models.values()))
    inputs = (x, *others)
    expected = [together(one) for one in inputs]
    rows = powernorm.fold(together, x).rows
    for one, wanted in zip(inputs, expected, strict=True):
        for name, found, before in zip(models, together(one), wanted, strict=True):
            gap = (found - before).detach().abs().max()
            assert gap <= 1e-12 * before.detach().abs().max(), name
    assert [row.name.partition(".")[0] for row in rows] == [str(i) for i in range(len(models))]
    assert all(bool(row.reason) == (left_of(row) != "fold") for row in rows)
    return {name: left_of(row) for name, row in zip(models, rows, strict=True)}


def left_by_name(cases: Mapping[str, tuple[Any, str]]) -> dict[str, str]:
    return {name: left for name, (_, left) in cases.items()}


# Convolutions in groups: each row reads the channels of its own group.


def test_grouped_convolutions() -> None:
    models = {
        f"in front: {groups} groups, {bias=}, {out} outputs": nn.Sequential(
            nn.Tanh(), channels(), conv(groups, out, bias), nn.GELU()
        )
        for groups in (1, 2, 3, C)
        for bias in (True, False)
        for out in (C, 2 * C)
    }
    models |= {
        f"behind: {groups} groups": nn.Sequential(
            nn.Tanh(), conv(groups, C, False, padding=1), channels(), nn.GELU()
        )
        for groups in (2, C)
    }
    # Zero padding is in front of a shift's way, not of a scale's.
    models["unshifted"] = nn.Sequential(
        nn.Tanh(), unshifted(channels()), conv(C, C, padding=1), nn.GELU()
    )
    models["shifted"] = nn.Sequential(nn.Tanh(), channels(), conv(C, C, padding=1), nn.GELU())
    expected = dict.fromkeys(models, "fold") | {"shifted": "multiply-add"}
    assert check(models, images(), images(5, 9)) == expected


def test_depthwise_in_one_dimension() -> None:
    depthwise = nn.Conv1d(C, C, 3, groups=C, dtype=torch.float64)
    model = nn.Sequential(nn.Tanh(), channels(), depthwise, nn.SiLU())
    assert check({"depthwise": model}, images(7), images(9)) == {"depthwise": "fold"}


# Padding, whose widths may come from a shape, as in Swin.


def _to_multiple(m: Net, x: Tensor) -> Tensor:
    extra = -x.shape[1] % 4
    y = F.pad(m.n(torch.tanh(x)), (0, 0, 0, extra))
    return m.a(y)[:, : x.shape[1]] + m.a(y).mean(1, keepdim=True)


def test_padding_of_no_width_pads_other_sizes() -> None:
    """A shift must not pass: where another size is padded, its zeros are not the norm's."""
    norms = {"fold": unshifted(bn()), "multiply-add": bn()}
    models = {left: Net(_to_multiple, n=norm, a=linear()) for left, norm in norms.items()}
    assert check(models, tokens(2, 8, C), tokens(2, 5, C)) == {left: left for left in norms}


PADS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "zeros": (lambda y: F.pad(y, (1, 2, 0, 1)), "multiply-add"),
    "ones": (lambda y: F.pad(y, (1, 2), value=1.0), "multiply-add"),
    "channels": (lambda y: F.pad(y, (0, 0, 0, 0, 1, 0)), "multiply-add"),
    "reflect": (lambda y: F.pad(y, (1, 2, 0, 1), mode="reflect"), "fold"),
    "circular": (lambda y: F.pad(y, (1, 1, 1, 1), mode="circular"), "fold"),
    "replicate": (lambda y: F.pad(y, (1, 1, 1, 1), mode="replicate"), "fold"),
}


def padded(pad: Callable[[Tensor], Tensor]) -> nn.Module:
    convolution = nn.LazyConv2d(4, 2, dtype=torch.float64)
    convolution(pad(images()))
    return Net(lambda m, x: m.a(pad(m.n(torch.tanh(x)))), n=channels(), a=convolution)


def test_padding() -> None:
    models = {name: padded(pad) for name, (pad, _) in PADS.items()}
    assert check(models, images(), images(5, 7)) == left_by_name(PADS)


# Pooling and resizing.


POOLS: dict[nn.Module, str] = {
    nn.AvgPool2d(2): "fold",
    nn.AvgPool2d(3, 2, ceil_mode=True): "fold",
    nn.AvgPool2d(3, 2, 1, count_include_pad=False): "fold",
    nn.AvgPool2d(3, 2, 1): "multiply-add",
    nn.AvgPool2d(2, divisor_override=3): "multiply-add",
    nn.AdaptiveAvgPool2d(1): "fold",
    nn.AdaptiveAvgPool2d((2, 3)): "fold",
    nn.Upsample(scale_factor=2): "fold",
    nn.Upsample(scale_factor=2, mode="bilinear"): "fold",
    nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True): "fold",
    # A negative scale would turn the largest value into the smallest.
    nn.MaxPool2d(2): "multiply-add",
}


def test_pooling() -> None:
    models = {
        f"{index} {pool}": nn.Sequential(
            nn.Tanh(), channels(), pool, nn.Conv2d(C, 3, 1, dtype=torch.float64)
        )
        for index, pool in enumerate(POOLS)
    }
    expected = dict(zip(models, POOLS.values(), strict=True))
    assert check(models, images(), images(5, 9)) == expected


def test_pooling_over_the_features() -> None:
    pools = {"average": nn.AvgPool1d(2), "adaptive": nn.AdaptiveAvgPool1d(2)}
    models = {name: nn.Sequential(nn.Tanh(), bn(), one, nn.Tanh()) for name, one in pools.items()}
    assert check(models, tokens()) == dict.fromkeys(pools, "multiply-add")


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


MASKS: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "masked mean": (_masked_mean, "fold"),
    "features masked": (_features_masked, "multiply-add"),
    "one token": (_one_token, "fold"),
    "token by feature": (_token_by_feature, "multiply-add"),
    "features shuffled": (_features_shuffled, "multiply-add"),
}


def test_expanded_masks() -> None:
    models = {name: Net(run, n=unshifted(bn()), a=linear()) for name, (run, _) in MASKS.items()}
    assert check(models, tokens(), tokens(3, 7, C)) == left_by_name(MASKS)


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


def _in_front(m: Net, x: Tensor) -> Tensor:
    return m.h(m.n(torch.tanh(x)))


def _behind(m: Net, x: Tensor) -> Tensor:
    return torch.tanh(m.n(m.h(torch.tanh(x))))


def _diagonal(m: Net, x: Tensor) -> Tensor:
    return torch.einsum("bic,cc->bic", m.n(torch.tanh(x)), m.h.weight)


def test_einsum() -> None:
    models = {
        f"{run.__name__}, {turned=}": Net(run, n=unshifted(bn()), h=Heads(turned))
        for run in (_in_front, _behind)
        for turned in (True, False)
    }
    expected = dict.fromkeys(models, "fold")
    # It has no place for a shift.
    models["shifted"] = Net(_in_front, n=bn(), h=Heads(False))
    models["diagonal"] = Net(_diagonal, n=bn(), h=linear(False))
    expected |= {"shifted": "multiply-add", "diagonal": "multiply-add"}
    assert check(models, tokens(), tokens(3, 7, C)) == expected


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


OWN_LINEARS: dict[str, tuple[nn.Linear, str]] = {
    "product with a bias": (Product(C, C, dtype=torch.float64), "fold"),
    "product": (Product(C, C, bias=False, dtype=torch.float64), "fold"),
    "doubled": (Doubled(C, C, bias=False, dtype=torch.float64), "multiply-add"),
    "biasless": (Biasless(C, C, bias=False, dtype=torch.float64), "multiply-add"),
}


def test_linear_layers_with_a_forward_of_their_own() -> None:
    models = {n: nn.Sequential(nn.Tanh(), bn(), one) for n, (one, _) in OWN_LINEARS.items()}
    assert check(models, tokens(), tokens(3, 7, C)) == left_by_name(OWN_LINEARS)


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
    models = {
        "fold": nn.Sequential(conv(out=C, bias=False), norm, nn.ReLU()),
        "multiply-add": nn.Sequential(nn.Tanh(), FrozenBatchNorm2d(), nn.Tanh()),
    }
    assert check(models, images(), images(5, 9)) == {left: left for left in models}
    assert norm not in list(models["fold"])


def test_frozen_statistics_with_more_behind_them() -> None:
    model = nn.Sequential(conv(out=C), FrozenBatchNorm2d(torch.relu), conv(), channels(2 * C))
    rows = powernorm.plan_fold(settle(model).eval(), images()).rows
    assert [row.action for row in rows] == ["keep", "fold"]


def test_pretrained_statistics_without_a_counter() -> None:
    """Checkpoints from before the counter leave it at 0."""
    norm = nn.BatchNorm2d(C, dtype=torch.float64)
    model = nn.Sequential(conv(out=C), norm, nn.ReLU()).eval()
    refuses(
        r"'1' \(BatchNorm2d\) have never seen a batch.*by where=", powernorm.fold, model, images()
    )
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)
    assert check({"pretrained": model}, images()) == {"pretrained": "fold"}
