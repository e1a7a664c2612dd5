import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import powernorm
from diagnosis.models import BATCH_STATISTICS_NORMS, Batch, Masked, batches, inputs_of
from powernorm.diagnosis import NormMonitor, NormRow
from powernorm.norms import BatchNorm, BatchStatisticsNorm, build_norm
from powernorm.records import NORMS_COLUMNS
from refusals import refuses


def train(model: nn.Module, batch: Batch) -> None:
    """Forward and backward with a step of the weights."""
    model(*batch).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
            parameter.grad = None


def observed(model: nn.Module, call: Callable[[], object], step: int = 0) -> list[NormRow]:
    """The rows of one step."""
    monitor = NormMonitor(model, every=1)
    monitor.start_step(step)
    call()
    return monitor.finish_step(step)


def expected(layer: BatchStatisticsNorm, tokens: Tensor) -> dict[str, float | None]:
    """SPEC 5 online and S20's distances, written out."""
    if layer.centered:
        deviation, mean = tokens.std(0, correction=0), tokens.mean(0)
        running, variance = layer.running_mean, layer.running_var
        return {
            "mean_tid": ((mean - running).abs() / deviation).mean().item(),
            "var_tid": ((deviation - variance.sqrt()).abs() / deviation).mean().item(),
            "mean_distance": ((mean - running).norm() / len(mean)).item(),
            "var_distance": ((deviation.square() - variance).norm() / len(mean)).item(),
        }
    square = tokens.square().mean(0)
    second = layer.running_second_moment
    return {
        "mean_tid": None,
        "var_tid": ((square.sqrt() - second.sqrt()).abs() / square.sqrt()).mean().item(),
        "mean_distance": None,
        "var_distance": ((square - second).norm() / len(square)).item(),
    }


def close(row: NormRow, values: dict[str, float | None]) -> None:
    for name, value in values.items():
        assert row[name] == (None if value is None else pytest.approx(value, rel=1e-9)), name


@pytest.mark.parametrize("norm", BATCH_STATISTICS_NORMS)
def test_rows_equal_the_definition(norm: str) -> None:
    torch.manual_seed(0)
    model = Masked(norm)
    monitor = NormMonitor(model, every=2)
    for step, batch in enumerate(batches(6)):
        monitor.start_step(step)
        with inputs_of([model.lower, model.upper]) as seen:
            train(model, batch)
        rows = monitor.finish_step(step)
        if step % 2:
            assert rows == []
            continue
        assert [row["layer"] for row in rows] == ["lower", "upper"]
        for row, layer in zip(rows, (model.lower, model.upper), strict=True):
            assert tuple(row) == NORMS_COLUMNS
            assert (row["step"], row["norm"]) == (step, norm)
            assert row["num_nonfinite_batches"] == 0
            close(row, expected(layer, seen[layer][0]))


@pytest.mark.parametrize(
    ("golden", "norm"),
    [("batchnorm_masked", "bn"), ("rbn_diff", "rbn"), ("rbn_diff_mean_only", "rbn")],
)
def test_online_tid_of_the_released_code(golden: str, norm: str) -> None:
    arrays = np.load(Path(__file__).parents[1] / "goldens" / f"{golden}.npz")
    features = arrays["x"].shape[-1]
    layer = build_norm(norm, features, variant="released", momentum=0.05, dtype=torch.float64)
    monitor = NormMonitor(nn.Sequential(layer), every=1)
    for step, (x, mask, tid) in enumerate(
        zip(arrays["x"], arrays["pad_mask"], arrays["tid"], strict=True)
    ):
        monitor.start_step(step)
        # The files are (length, batch, features).
        x = torch.from_numpy(x).transpose(0, 1).requires_grad_()
        layer(x, torch.from_numpy(mask)).sum().backward()
        (row,) = monitor.finish_step(step)
        assert row["mean_tid"] == pytest.approx(tid[0], abs=1e-10)
        assert row["var_tid"] == pytest.approx(tid[1], abs=1e-10)


def test_several_calls_in_a_step_are_averaged() -> None:
    model = Masked("bn")
    with inputs_of([model.lower]) as seen:
        row = observed(model, lambda: [model(*batch) for batch in batches(2)])[0]
    parts = [expected(model.lower, tokens) for tokens in seen[model.lower]]
    close(row, {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]})


def test_evaluation_in_the_middle_of_a_step_is_not_seen() -> None:
    model = Masked("bn")
    data = batches(2)
    with inputs_of([model.lower]) as seen:
        row = observed(model, lambda: (model(*data[0]), model.eval()(*data[1])))[0]
    close(row, expected(model.lower, seen[model.lower][0]))


def test_nonfinite_batches_are_counted_and_shown() -> None:
    model = nn.Sequential(BatchNorm(2))
    (row,) = observed(model, lambda: model(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]])))
    assert row["num_nonfinite_batches"] == 1
    assert row["mean_tid"] != row["mean_tid"]


def test_batch_without_tokens_has_empty_cells() -> None:
    model = nn.Sequential(BatchNorm(2))
    (row,) = observed(model, lambda: model(torch.zeros(0, 2)), step=3)
    assert [row[name] for name in NORMS_COLUMNS[3:7]] == [None] * 4
    assert row["step"] == 3


def test_detached_monitor_leaves_no_hook() -> None:
    model = Masked("pn")
    monitor = NormMonitor(model, every=1)
    assert any(module._forward_pre_hooks for module in model.modules())
    monitor.start_step(0)
    model(*batches(1)[0])
    monitor.detach()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks_with_kwargs for module in model.modules())
    assert monitor.finish_step(0) == []


def test_model_without_norms_has_no_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert observed(model, lambda: model(torch.randn(2, 4))) == []


def test_warns_once_where_hooks_do_not_fire() -> None:
    monitor = NormMonitor(Masked("bn"), every=1)
    monitor.start_step(0)
    with pytest.warns(RuntimeWarning, match="saw none of its 2 layers in step 0"):
        monitor.finish_step(0)
    monitor.start_step(1)
    assert monitor.finish_step(1) == []


@pytest.mark.parametrize("how", ["function", "method", "inside"])
def test_compiled_model_is_refused(how: str) -> None:
    model: nn.Module = Masked("bn")
    if how == "function":
        model = torch.compile(model, backend="eager")
    elif how == "method":
        model.compile(backend="eager")
    else:
        model = nn.Sequential(torch.compile(model, backend="eager"))
    refuses("before torch", NormMonitor, model, every=1)


def token_norm_model(norm: str, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6, dtype=torch.float64), build_norm(norm, 6, dtype=torch.float64, **options)
    )


@pytest.mark.parametrize(
    "norm", ["ln", "ln-simple", "detach", "adanorm", "rms", "gs", "gn", "none"]
)
def test_gradients_of_token_norms(norm: str) -> None:
    model = token_norm_model(norm)
    seen: list[Tensor] = []
    handle = model[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    monitor = NormMonitor(model, every=1)
    monitor.start_step(7)
    total = torch.zeros(2, 6, 6, dtype=torch.float64)
    for _ in range(2):
        x = torch.randn(3, 6, dtype=torch.float64)
        y = model(x)
        seen[-1].retain_grad()
        (y * torch.randn_like(y)).sum().backward()
    handle.remove()
    (row,) = monitor.finish_step(7)
    assert (row["step"], row["layer"], row["norm"]) == (7, "1", norm)
    assert [row[name] for name in NORMS_COLUMNS[3:8]] == [None] * 5
    total = torch.cat([one.grad for one in seen])
    assert row["gradient_norm"] == pytest.approx(total.norm().item(), rel=1e-9)
    means, variances = total.mean(-1), total.var(-1, correction=0)
    assert row["token_gradient_mean"] == pytest.approx(means.mean().item(), rel=1e-9, abs=1e-15)
    assert row["token_gradient_var"] == pytest.approx(variances.mean().item(), rel=1e-9)
    assert row["mean_gradient_norm"] is row["var_gradient_norm"] is None


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("norm", ["adanorm", "ln-simple"])
def test_share_above_the_bound(norm: str, variant: str) -> None:
    features = 200
    layer = build_norm(norm, features, variant=variant, **({"k": 0.4} if norm == "adanorm" else {}))
    bound = 2.5 if norm == "adanorm" else 10.0
    x = torch.randn(3, 4, features).pow(5)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2:] = True
    x[mask] = float("nan")
    (row,) = observed(nn.Sequential(layer), lambda: layer(x, mask))
    valid = x[~mask]
    released = variant == "released"
    std = valid.std(-1, correction=int(released), keepdim=True)
    y = (valid - valid.mean(-1, keepdim=True)) / std
    expected = (y.abs() > bound).double().mean().item()
    assert 0 < expected < 0.1
    assert row["outlier_share"] == pytest.approx(expected, rel=1e-9)
    assert row["nonfinite_input"] == 0


@pytest.mark.parametrize("norm", ["none", "dyt", "ln", "rms"])
def test_scale_of_the_input(norm: str) -> None:
    """Over two calls of different sizes, without padding that is NaN; None without a token."""
    layer = build_norm(norm, 8)
    x, more = 3 * torch.randn(3, 4, 8), torch.randn(1, 4, 8)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[:, 3] = True
    x[mask] = float("nan")
    (row,) = observed(nn.Sequential(layer), lambda: (layer(x, mask), layer(more)))
    expected = torch.cat([x[~mask], more[0]]).double().square().mean().sqrt().item()
    assert row["input_scale"] == pytest.approx(expected, rel=1e-9)
    (row,) = observed(nn.Sequential(layer), lambda: layer(x, torch.ones_like(mask)))
    assert row["input_scale"] is None


@pytest.mark.parametrize(
    ("norm", "options", "slope", "shift"),
    [
        ("dyt", {"alpha": 0.7}, 0.7, 0.0),
        ("derf", {"alpha": 0.7, "shift": 0.4}, 0.7, 0.4),
        ("dyisru", {"spread": 4.0}, 0.5, 0.0),
    ],
)
def test_share_beyond_the_linear_range(
    norm: str, options: dict[str, float], slope: float, shift: float
) -> None:
    """In the monitor, with padding that is NaN, and in `diagnose`."""
    layer = build_norm(norm, 200, **options)
    x = 2 * torch.randn(3, 4, 200)
    expected = (slope * x[:, :3] + shift).abs().gt(1).double().mean().item()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[:, 3] = True
    x[mask] = float("nan")
    (row,) = observed(nn.Sequential(layer), lambda: layer(x, mask))
    assert 0.1 < expected < 0.9
    assert row["saturated_share"] == pytest.approx(expected, rel=1e-9)
    assert row["slope"] == pytest.approx(slope, rel=1e-6)
    assert row["outlier_share"] is None
    model = nn.Sequential(nn.Identity(), layer)
    (found,) = powernorm.diagnose(model, [x[:2, :3], x[2:, :3]], spectra=False).rows
    assert found.saturated_share == pytest.approx(expected, rel=1e-9)
    assert found.slope == pytest.approx(slope, rel=1e-6)
    # At z = 1 less than half of the slope at z = 0 is left.
    at = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    z = (at - shift) / slope
    bare = build_norm(norm, 1, **options, dtype=torch.float64)
    (steepness,) = torch.autograd.grad(bare(z.unsqueeze(-1)).sum(), at)
    assert 0.3 < steepness[1] / steepness[0] < 0.5


def test_other_norms_have_no_bound() -> None:
    model = token_norm_model("ln")
    (row,) = observed(model, lambda: model(torch.randn(2, 6, dtype=torch.float64)))
    assert row["outlier_share"] is None
    assert row["gradient_norm"] is None  # there was no backward


@pytest.mark.parametrize("norm", ["ln", "bn"])
def test_with_a_residual_the_gradient_is_the_norms_alone(norm: str) -> None:
    rows = []
    for fused in (False, True):
        torch.manual_seed(0)
        layer = build_norm(norm, 6, dtype=torch.float64)
        x, residual = (torch.randn(4, 6, dtype=torch.float64).requires_grad_() for _ in range(2))
        weights = torch.randn(4, 6, dtype=torch.float64)
        monitor = NormMonitor(nn.Sequential(layer), every=1)
        monitor.start_step(0)
        if fused:
            y, stream = layer(x, None, residual)
        else:
            stream = x + residual
            y = layer(stream)
        (y * weights + stream.square()).sum().backward()
        rows.append((*monitor.finish_step(0), x.grad, residual.grad))
    assert rows[0][0] == pytest.approx(rows[1][0])
    torch.testing.assert_close(rows[0][1:], rows[1][1:])


@pytest.mark.parametrize("norm", ["bn", "pn", "ln"])
def test_loss_scale_is_taken_out(norm: str) -> None:
    rows = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = Masked(norm)
        model.dropout.p = 0.0
        monitor = NormMonitor(model, every=1)
        for step in range(3):
            monitor.start_step(step, torch.tensor(scale))
            (model(torch.randn(2, 3, 6, dtype=torch.float64)).square().sum() * scale).backward()
            row = monitor.finish_step(step)[1]
        rows.append(row)
    assert rows[0]["gradient_norm"] > 0
    assert rows[0] == pytest.approx(rows[1])


def test_clipping_comes_later() -> None:
    model = Masked("bn")
    monitor = NormMonitor(model, every=1)
    batch = batches(1)[0]
    rows = []
    for clip in (False, True):
        torch.manual_seed(0)
        monitor.start_step(0)
        model(*batch).square().sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        rows.append(monitor.finish_step(0)[1]["gradient_norm"])
    assert rows[0] == rows[1]


class Broken(nn.Module):
    """A norm, then something that may break, then a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = build_norm("ln", 4), BatchNorm(4)
        self.factor = 1.0
        self.root = False

    def forward(self, x: Tensor) -> Tensor:
        lower = self.lower(x) * self.factor
        if self.root:  # its gradient is infinite at 0
            lower = lower - lower.detach()
            lower = lower.abs().sqrt()
        return self.upper(lower)


def test_first_norm_that_is_not_finite() -> None:
    model = Broken()
    monitor = NormMonitor(model, every=1)

    def observe() -> list[tuple[object, ...]]:
        monitor.start_step(0)
        x = torch.randn(5, 4, requires_grad=True)
        (model(x) * torch.randn(5, 4)).sum().backward()
        names = ("nonfinite_input", "nonfinite_gradient", "first_nonfinite")
        return [tuple(row[name] for name in names) for row in monitor.finish_step(0)]

    assert observe() == [(0, 0, 0), (0, 0, 0)]
    assert monitor.first_nonfinite is None
    model.factor = float("inf")
    assert observe() == [(0, 1, 0), (1, 1, 1)]
    assert monitor.first_nonfinite == "upper"
    model.factor, model.root = 1.0, True
    # Forward all is finite; backward the root breaks what comes to the lower norm.
    assert observe() == [(0, 1, 0), (0, 1, 1)] or monitor.first_nonfinite == "lower"


def test_derivatives_of_derivatives_go_through() -> None:
    model = token_norm_model("ln")
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    grads = []
    for watched in (False, True):
        monitor = NormMonitor(model, every=1) if watched else None
        if monitor is not None:
            monitor.start_step(0)
        (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = []
    data = torch.randn(4, 64, 6) + 3
    weights = torch.randn(4, 64, 6)
    for narrow in (torch.float32, dtype):
        model = nn.Sequential(build_norm("bn", 6), build_norm("ln", 6))
        monitor = NormMonitor(model, every=1)
        monitor.start_step(0)
        x = data.to(dtype).to(narrow).requires_grad_()
        y = model[1](model[0](x).float())
        (y * weights).sum().backward()
        rows.append(monitor.finish_step(0)[0])
    assert rows[1]["mean_tid"] == pytest.approx(rows[0]["mean_tid"], rel=1e-5)
    assert rows[1]["mean_gradient_norm"] == pytest.approx(rows[0]["mean_gradient_norm"], rel=0.05)
    assert rows[1]["gradient_norm"] == pytest.approx(rows[0]["gradient_norm"], rel=0.05)
