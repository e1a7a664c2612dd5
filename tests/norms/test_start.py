"""How running statistics start: by the plain average of the first batches, or as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import powernorm
from refusals import refuses

pytestmark = pytest.mark.filterwarnings("error:a .* evaluates after:UserWarning")

NAMES = ("bn", "rbn", "brn", "mabn", "repbn", "prepbn", "pnv", "un")
FORWARD_pytestmark = pytest.mark.filterwarnings("error:a .* evaluates after:UserWarning")

NAMES = ("bn", "repbn", "pnv")
MOMENTUM = 0.25


def batches(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [0.03 * (t + 1) * torch.randn(6, 3, 4, generator=generator) for t in range(number)]


def build(name: str, **options: Any) -> Any:
    own = {"mabn": {"warmup_steps": 100}, "prepbn": {"decay_steps": 5}}.get(name, {})
    return powernorm.build_norm(name, 4, **{"momentum": MOMENTUM, **own, **options})


def train(norm: Any, data: list[Tensor]) -> Tensor:
    """Steps on the data; the running variance or second moment after them."""
    for x in data:
        norm(x.clone().requires_grad_()).square().sum().backward()
    found: Tensor = norm.running_stats[1]
    return found


def averaged(name: str, data: list[Tensor], weights: list[float]) -> Tensor:
    """The variances or second moments of the batches, moved one after the other by weights."""
    total = torch.ones(4)
    for x, weight in zip(data, weights, strict=True):
        x = x.flatten(0, 1)
        square = x.square().mean(0) if name in ("mabn", "pnv", "un") else x.var(0)
        total = (1 - weight) * total + weight * square
    return total


@pytest.mark.parametrize("backend", ["eager", None])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_batches_are_averaged(name: str, backend: Any) -> None:
    data = batches(6)
    with powernorm.ops.use_backend(backend if name not in ("mabn", "un") else None):
        for start in (None, "average"):
            found = train(build(name, start=start), data)
            weights = [1, 1 / 2, 1 / 3, MOMENTUM, MOMENTUM, MOMENTUM]
            torch.testing.assert_close(found, averaged(name, data, weights))
        found = train(build(name, start="torch"), data)
        torch.testing.assert_close(found, averaged(name, data, [MOMENTUM] * 6))


@pytest.mark.parametrize("name", NAMES)
def test_compiled_layers_average_alike(name: str) -> None:
    data = batches(3)
    norm = build(name)
    call = torch.compile(norm, backend="aot_eager", fullgraph=True)
    for x in data:
        call(x.clone().requires_grad_()).square().sum().backward()
    torch.testing.assert_close(norm.running_stats[1], train(build(name), data))


@pytest.mark.parametrize("name", ["bn", "rbn", "pnv", "repbn", "prepbn", "un"])
def test_released_layers_start_as_torch(name: str) -> None:
    data = batches(2)
    released = [build(name, variant="released", **o) for o in ({}, {"start": "torch"})]
    found = [train(norm, data) for norm in released]
    assert torch.equal(*found)
    assert not torch.equal(found[0], train(build(name, variant="released", start="average"), data))


def test_batches_that_are_left_out_do_not_count() -> None:
    data = batches(3)
    norm = build("bn")
    train(norm, [torch.full((3, 4), torch.inf), *data])
    torch.testing.assert_close(norm.running_var, averaged("bn", data, [1, 1 / 2, 1 / 3]))


def test_a_counter_begun_anew_averages_anew() -> None:
    """As after some lost batches: the count of the average never falls below one."""
    norm = build("bn")
    train(norm, [torch.full((3, 4), torch.inf), *batches(2)])
    norm.num_batches_tracked.zero_()
    last = batches(3)[2:]
    torch.testing.assert_close(train(norm, last), averaged("bn", last, [1.0]))


@pytest.mark.parametrize("backend", ["eager", None])
def test_the_warm_up_of_prepbn_is_in_no_average(backend: Any) -> None:
    data = batches(6)
    with powernorm.ops.use_backend(backend):
        found = train(build("prepbn", warmup_steps=1, accumulation=2), data)
    torch.testing.assert_close(found, averaged("prepbn", data[2:], [1, 1 / 2, 1 / 3, MOMENTUM]))


def test_statistics_of_a_whole_step_count_once() -> None:
    data = batches(4)
    model = nn.Sequential(build("bn"))
    for pair in (data[:2], data[2:]):
        with powernorm.training_step(model):
            for x in pair:
                model(x).sum().backward()
    joined = [torch.cat(pair) for pair in (data[:2], data[2:])]
    torch.testing.assert_close(model[0].running_var, averaged("bn", joined, [1, 1 / 2]))


def test_batch_renorm_corrects_nothing_before_it_has_statistics() -> None:
    x = batches(1)[0]
    settings = {"warmup_steps": 0, "ramp_steps": 0, "max_r": 3.0, "max_d": 5.0}
    torch.testing.assert_close(build("brn", **settings)(x), build("bn")(x))
    corrected = build("brn", start="torch", **settings)(x)
    assert corrected.std() < 0.5  # toward a variance of 1


def test_the_penalty_of_the_first_step_is_of_the_batch_itself() -> None:
    """Not of its distance from 0 and 1."""
    x = batches(1)[0]
    averaging, starting = build("rbn"), build("rbn", start="torch")
    y = averaging(x), starting(x)  # kept, or there is no penalty
    assert averaging.penalty() < 1e-4 < starting.penalty()
    del y


def test_a_wrong_start_is_named() -> None:
    refuses("start is 'zero', expected 'average', 'torch'", powernorm.BatchNorm, 4, start="zero")
    refuses("option start of pnv is 'mean'", powernorm.build_norm, "pnv", 4, start="mean")
    norm = powernorm.BatchNorm(4, start="torch")
    assert "start='torch'" in repr(norm)
    with pytest.raises(powernorm.InputError, match="start is 1"):
        norm.start = 1  # type: ignore[assignment]


def test_what_a_swap_starts_by() -> None:
    """An average would drop the statistics that are taken over."""
    model = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4))
    for index in "01":
        powernorm.swap(model, to="rbn", where=index)
    assert [norm.start for norm in model] == [None, "torch"]  # type: ignore[union-attr]
    own = nn.Sequential(build("bn"), build("bn", start="average"))
    train(own[0], batches(2))
    powernorm.swap(own, to="rbn", where="0")
    powernorm.swap(own, to="bn", where="1")
    assert [norm.start for norm in own] == ["torch", "average"]  # type: ignore[union-attr]
    chosen = nn.Sequential(nn.BatchNorm1d(4))
    powernorm.swap(chosen, to="bn", start="average")
    assert chosen[0].start == "average"
    masked = nn.Sequential(nn.BatchNorm1d(4))
    powernorm.mask_batch_norms(masked)
    assert masked[0].start == "torch"


def far_model(**options: Any) -> Any:
    """Trained for ten steps on inputs much smaller than 1, and in evaluation."""
    torch.manual_seed(0)
    names = ("bn", "rbn")
    model = nn.Sequential(*(powernorm.build_norm(name, 4, **options) for name in names))
    for x in batches(10):
        y = model(x.requires_grad_())
        (y.sum() + powernorm.penalty(model, num_tokens=18)).backward()
    return model.eval()


FAR = r"a BatchNorm evaluates after 10 steps .* factor of \d+\.\d .*powernorm\.calibrate"


def test_an_evaluation_far_from_its_batch_warns_once() -> None:
    x = torch.cat(batches(10)[5:])
    for _ in range(2):  # of each model
        model = far_model(start="torch", momentum=0.05)
        with pytest.warns(UserWarning, match=FAR) as warned:
            model(x)
        assert len(warned) == 1
        model(x)
        model.train()(x)
        model.eval()(x)
    calibrated = far_model(start="torch", momentum=0.05)
    powernorm.calibrate(calibrated, [x])
    calibrated(x)
    far_model(momentum=0.05)(x)


def test_an_evaluation_that_tells_little_does_not_warn() -> None:
    x = torch.cat(batches(10)[5:])
    model = far_model(start="torch", momentum=0.05)
    for quiet in (x[:1], x.to("meta")):
        model.to(quiet.device)(quiet)
        model = far_model(start="torch", momentum=0.05)
    with powernorm.padding_mask(torch.arange(30)[:, None].expand(30, 3) > 2):
        model(x)
    model = far_model(start="torch", momentum=0.05)
    torch.func.vmap(model, randomness="error")(x[:, None])
    make_fx(model)(x)
    torch.compile(model, backend="eager")(x)
    frozen = far_model(start="torch", momentum=0.05)
    for layer in frozen:
        layer.freeze_statistics()
    frozen(x)
    fresh = nn.Sequential(powernorm.BatchNorm(4), powernorm.PowerNorm(4)).eval()
    fresh(x)
    with torch.no_grad():
        fresh.train()[1](x)
    fresh.eval()(x)


def test_padding_takes_no_part_in_the_comparison() -> None:
    x = torch.cat(batches(10)[5:])
    model = nn.Sequential(build("bn"))
    train(model[0], batches(10)[5:])
    padded = torch.cat([x, torch.full_like(x, 50.0)], 1)
    mask = torch.arange(6).expand(30, 6) > 2
    with powernorm.padding_mask(mask):
        model.eval()(padded)
    train(model.train()[0], [x])


def test_norms_that_train_by_running_statistics_need_steps() -> None:
    norm = build("mabn", warmup_steps=0, window=2, start="torch", momentum=0.001)
    train(norm, batches(5))
    with pytest.warns(UserWarning, match=r"median feature: train for more steps$"):
        norm.eval()(torch.cat(batches(5)))
