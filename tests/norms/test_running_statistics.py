"""How running statistics move: by a weight, as a plain average, from afar."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from refusals import refuses

CENTERED = ("bn", "rbn", "brn")
each_centered = pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in CENTERED),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("rbn", "bn", "brn")),
    ],
)


def batches(number: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (6, 2, 9, 1, 4)
    return [
        torch.randn(sizes[t % 5], 3, 4, generator=generator, dtype=torch.float64) * (t + 1) + t
        for t in range(number)
    ]


def averaging(name: str) -> Any:
    return powernorm.build_norm(name, 4, momentum=None, dtype=torch.float64)


def averaged_by_torch(number: int = 5) -> nn.BatchNorm1d:
    theirs = nn.BatchNorm1d(4, momentum=None, dtype=torch.float64)
    for x in batches(number):
        theirs(x.flatten(0, 1))
    return theirs


@each_centered
def test_no_momentum_is_the_plain_average_as_in_torch(name: str, compiled: bool) -> None:
    """As `torch.nn.BatchNorm1d(momentum=None)`: exponential averages forget the first batches."""
    norm = averaging(name)
    call = torch.compile(norm, fullgraph=True, dynamic=True) if compiled else norm
    for x in batches():
        call(x.requires_grad_()).sum().backward()
    theirs = averaged_by_torch()
    torch.testing.assert_close(norm.running_mean, theirs.running_mean)
    torch.testing.assert_close(norm.running_var, theirs.running_var)


def test_no_momentum_without_a_mean() -> None:
    norm = averaging("pnv")
    for x in batches():
        norm(x)
    expected = torch.stack([x.square().mean((0, 1)) for x in batches()]).mean(0)
    torch.testing.assert_close(norm.running_second_moment, expected)


def test_momentum_can_be_dropped_later() -> None:
    """To re-estimate statistics by hand: reset, then average over a pass."""
    norm = powernorm.BatchNorm(4, dtype=torch.float64)
    norm(batches()[3])
    norm.momentum = None
    norm.reset_running_stats()
    for x in batches(3):
        norm(x)
    torch.testing.assert_close(norm.running_var, averaged_by_torch(3).running_var)
    with pytest.raises(powernorm.InputError, match=r"momentum is 1\.5"):
        norm.momentum = 1.5


def test_a_nonfinite_batch_takes_no_part_in_the_plain_average() -> None:
    norm = averaging("bn")
    norm(torch.full((3, 4), torch.inf, dtype=torch.float64))
    for x in batches():
        norm(x)
    torch.testing.assert_close(norm.running_mean, averaged_by_torch().running_mean)


def test_penalty_of_a_plain_average_has_the_buffers_after_the_step() -> None:
    norm = averaging("rbn")
    for x in batches():
        y = norm(x)  # kept, or its penalty would have no gradient
        penalty = norm.penalty()
        (y.sum() + penalty).backward()
        tokens = x.flatten(0, 1)
        mean_gap = norm.running_mean - tokens.mean(0)
        var_gap = norm.running_var - tokens.var(0, correction=0)
        expected = 0.1 * mean_gap.square().sum() + 0.01 * var_gap.abs().sum()
        torch.testing.assert_close(penalty, expected)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("bn", "momentum", 0.9),
        ("bn", "variant", "released"),
        ("rbn", "variant", "released"),
        ("pnv", "momentum", None),
        ("pnv", "start", "average"),
        ("pn", "momentum", 0.9),
        ("pn", "backward_momentum", 0.9),
        ("pn-only", "decay", "floored"),
    ],
)
@pytest.mark.parametrize("backend", ["eager", None])
def test_settings_may_change_between_steps(
    name: str, setting: str, value: Any, backend: Any
) -> None:
    """A schedule that sets them would be ignored without a word."""
    options = {"warmup_steps": 0} if name in ("pn", "pn-only") else {"start": "torch"}
    norm = powernorm.build_norm(name, 4, **options)
    x = batches()[0].float()
    with powernorm.ops.use_backend(backend):
        norm(x).backward(8 * x)
        unchanged = deepcopy(norm)
        setattr(norm, setting, value)
        expected = deepcopy(norm)  # a copy prepares its updates again
        for layer in (norm, expected, unchanged):
            layer(x * 20).backward(-8 * x)
    for got, wanted in zip(norm.buffers(), expected.buffers(), strict=True):
        assert torch.equal(got, wanted)
    pairs = zip(norm.buffers(), unchanged.buffers(), strict=True)
    assert not all(torch.equal(got, other) for got, other in pairs)


@pytest.mark.parametrize("layer", [powernorm.PowerNorm, powernorm.MovingAverageBatchNorm])
def test_norms_that_train_by_their_average_need_a_momentum(layer: Any) -> None:
    """ψ that follows the weights less and less would end in gradients that explode."""
    refuses(r"momentum is None.*running average", layer, 4, momentum=None)
    norm = layer(4)
    with pytest.raises(powernorm.InputError, match=r"momentum is None.*running average"):
        norm.momentum = None


def train_from(norm: Any, x: Tensor, value: float) -> Any:
    """One step that takes the new batch alone, from statistics that are far off."""
    with torch.no_grad():
        for name, buffer in norm.named_buffers():
            if buffer.is_floating_point() and "gradient" not in name:
                buffer.fill_(value)
    norm(x).backward(x.sign())
    return norm


BACKENDS = ("eager", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bn", {}),
        ("bn", {"variant": "released"}),
        ("rbn", {}),
        ("pnv", {}),
        ("pn-only", {"warmup_steps": 0}),
        ("pn-only", {"warmup_steps": 2, "variant": "released"}),
        ("mabn", {"window": 2}),
    ],
)
def test_the_whole_weight_takes_the_new_batch_as_it_is(
    name: str, options: dict[str, Any], backend: Any
) -> None:
    """`b + w (v - b)` gives 0 for a batch of scale 1 after one of 1e15."""
    x = batches()[2].flatten(0, 1).float().requires_grad_()
    with powernorm.ops.use_backend(backend):
        norm = train_from(powernorm.build_norm(name, 4, momentum=1.0, **options), x, 1e30)
    moment = x.detach().square().mean(0)
    buffers = dict(norm.named_buffers())
    if "running_mean" in buffers:
        correction = int("variant" not in options)
        torch.testing.assert_close(buffers["running_mean"], x.detach().mean(0))
        torch.testing.assert_close(buffers["running_var"], x.detach().var(0, correction=correction))
    else:
        torch.testing.assert_close(buffers["running_second_moment"], moment)
    if name == "mabn":
        torch.testing.assert_close(buffers["window_second_moment"][1], moment)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_moment_whose_factor_is_0_is_the_new_one(backend: Any) -> None:
    """ν after one bad loss must come back once its factor allows it."""
    norm = powernorm.PowerNorm(
        4, groups=None, decay="floored", backward_momentum=1.0, warmup_steps=0
    )
    x = (3 * batches()[2].flatten(0, 1).float()).requires_grad_()
    norm.running_gradient_moment.fill_(1e30)
    with powernorm.ops.use_backend(backend):
        train_from(norm, x, 1.0)
    expected = x.detach().abs().mean(0) / (1 + norm.eps) ** 0.5
    torch.testing.assert_close(norm.running_gradient_moment, expected)


def test_penalty_takes_the_new_batch_as_it_is() -> None:
    norm = powernorm.RegularizedBatchNorm(4, variant="released", momentum=1.0)
    norm.running_mean.fill_(1e30)
    norm.running_var.fill_(1e30)
    y = norm(batches()[2].float().requires_grad_())
    assert norm.penalty().item() == 0
    del y


def far_tokens() -> Tensor:
    """Mean 1e9 and spread 1: x² has 18 digits before those of the variance, float64 has 16."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(96, 4, generator=generator, dtype=torch.float64) + 1e9


def check_far(norm: Any, x: Tensor, correction: int = 1) -> None:
    torch.testing.assert_close(norm.running_mean, x.mean(0), rtol=1e-15, atol=0)
    torch.testing.assert_close(norm.running_var, x.var(0, correction=correction), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CENTERED)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_variance_far_from_zero(name: str, backend: Any, masked: bool) -> None:
    """From sums of x and x² it would be 0, or anything up to 100."""
    norm = powernorm.build_norm(name, 4, momentum=1.0, dtype=torch.float64)
    x, mask = far_tokens(), torch.arange(96) % 3 == 0 if masked else None
    with powernorm.ops.use_backend(backend):
        norm(x.clone().requires_grad_(), mask).sum().backward()
    check_far(norm, x if mask is None else x[~mask])


@each_centered
def test_held_variance_far_from_zero(name: str, compiled: bool) -> None:
    norm = powernorm.build_norm(name, 4, momentum=1.0, dtype=torch.float64)
    call = torch.compile(norm, fullgraph=True, dynamic=True) if compiled else norm
    x = far_tokens()
    with powernorm.training_step(norm):
        for part in x.split(40):
            call(part.clone().requires_grad_()).sum().backward()
    check_far(norm, x)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_uses_of_a_shared_layer_with_other_means_are_one_batch(offset: float) -> None:
    """The variance of both together has the gap of their means in it."""
    norm = powernorm.RegularizedBatchNorm(4, momentum=1.0, dtype=torch.float64)
    first, second = torch.randn(2, 30, 4, dtype=torch.float64) + offset
    (norm(first) + norm(second + 7)).sum().backward()
    both = torch.cat([first, second + 7])
    torch.testing.assert_close(norm.running_var, both.var(0), rtol=1e-6, atol=0)
