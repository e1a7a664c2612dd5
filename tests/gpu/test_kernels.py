"""The Triton programs against the reference in float64: on a GPU, else under the interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covering import some_default
from gpu.kernel_cases import (
    CHECKS,
    DEVICE,
    FLOATS,
    Case,
    check_batch,
    check_power,
    check_static,
    check_token,
    kernels,
)
from powernorm.ops import eager
from powernorm.ops.batch_norm import BatchNormArgs
from powernorm.ops.power_norm import PowerNormArgs
from powernorm.ops.running_stats import (
    Average,
    CenteredUpdate,
    PowerUpdate,
    UncenteredUpdate,
    Update,
)


@pytest.mark.parametrize("seed", some_default(range(60), *range(12)))
@pytest.mark.parametrize("check_op", CHECKS)
def test_op(check_op: Callable[[Case], None], seed: int) -> None:
    # Statistics that are given leave no token out: the op takes no mask.
    masks = {"mask": None} if check_op is check_static else {}
    check_op(Case(seed, **masks))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("check_op", CHECKS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_wide_odd_rows(check_op: Callable[[Case], None], dtype: torch.dtype) -> None:
    """513 features: several blocks of columns, or 3 groups of 171 in a tile of 4 x 256."""
    for groups in (0, 3):
        check_op(Case(7, dtype=dtype, width=513, tokens=9, groups=groups, mask=None))


@pytest.mark.parametrize("seed", range(6))
def test_variance_of_offset_data(seed: int) -> None:
    case = Case(
        seed, dtype=torch.float32, offset=1e4, tokens=37, residual=False, groups=0,
        mask=(None, "some")[seed % 2],
    )  # fmt: skip
    check_batch(case)


def plain_args(x: Tensor, mean: Tensor, var: Tensor) -> BatchNormArgs:
    return BatchNormArgs(x, None, None, None, None, mean, var, None, None, 0, 1e-5, False, "")


def test_variance_of_offset_data_is_right() -> None:
    case = Case(0, dtype=torch.float32, offset=1e4, tokens=37, width=64, residual=False, groups=0)
    output = kernels.batch_norm(plain_args(case.x, case.mean, case.var))
    truth = case.x.double().var(0, correction=0)
    torch.testing.assert_close(output.statistics[1].double(), truth, rtol=1e-4, atol=0)
    var = output.sums[2] / output.sums[0]
    torch.testing.assert_close(var, truth, rtol=1e-4, atol=0)


def test_variance_far_from_zero() -> None:
    """Mean 1e9 and spread 1 in float64, up to the buffers."""
    case = Case(0, dtype=torch.float64, offset=1e9, tokens=37, width=17, residual=False, groups=0)
    mean, var = (torch.zeros(17, dtype=torch.float64, device=DEVICE) for _ in range(2))
    output = kernels.batch_norm(plain_args(case.x, mean, var))
    counters = [torch.tensor(0, device=DEVICE) for _ in range(2)]
    kernels.update_running_stats(CenteredUpdate((mean, var, *counters), 1.0, True), output.sums)
    torch.testing.assert_close(var, case.x.var(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(output.statistics[1], case.x.var(0, correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("inf"), 3e38])
def test_nonfinite_data(value: float) -> None:
    """One bad feature leaves the others right."""
    case = Case(3, dtype=torch.float32, width=17, tokens=9, mask=None, residual=False, groups=0)
    case.x[4, 5] = value
    check_batch(case)
    # PowerNorm's kernel derives Σ x̂² from Σ x², which is infinite here as well.
    if value == float("inf"):
        check_power(case)


def test_expanded_and_transposed() -> None:
    """Strides that no row stride describes, more than one leading dimension."""
    case = Case(1, dtype=torch.float32, width=17, tokens=6, mask="some", residual=False, groups=0)
    assert case.mask is not None
    case.x = torch.randn(17, 2, 3, generator=case.generator).to(DEVICE).permute(1, 2, 0)
    case.mask = case.mask.reshape(3, 2).t()
    case.grad_y = torch.ones((), device=DEVICE).expand(2, 3, 17)
    check_batch(case)
    check_power(case)


@pytest.mark.parametrize("check_op", [check_batch, check_power])
@pytest.mark.parametrize("seed", some_default(range(100, 110), *range(100, 104)))
def test_several_processes(
    check_op: Callable[[Case], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums over a group replace this process's own where the reference's do."""
    calls = []

    def with_others(tensor: Tensor, group_name: str) -> Tensor:
        calls.append((group_name, tuple(tensor.shape)))
        return tensor + 1.5 if group_name else tensor

    def merged_with_others(sums: Tensor, centered: bool, group_name: str) -> Tensor:
        del centered
        return with_others(sums, group_name)

    for name in ("batch_norm", "power_norm"):
        for package in ("powernorm.ops.kernels.triton", "powernorm.ops"):
            module = importlib.import_module(f"{package}.{name}")
            monkeypatch.setattr(module, "all_reduce_sum", with_others)
            if name == "batch_norm":
                monkeypatch.setattr(module, "reduce_sums", merged_with_others)
    case = Case(seed)
    case.group_name = "other processes"
    check_op(case)
    kinds = {kind: calls.count(kind) for kind in calls if kind[0]}
    # The kernels, the eager reference and the one in float64: equally often.
    assert all(number % 3 == 0 for number in kinds.values())


UPDATES: tuple[tuple[Callable[..., Update], int, int], ...] = (
    (lambda *buffers: CenteredUpdate(buffers, 0.1, False), 2, 4),
    (lambda *buffers: CenteredUpdate(buffers, 0.1, True), 2, 4),
    (lambda *buffers: CenteredUpdate(buffers, Average(0.05), True), 2, 4),
    (lambda *buffers: UncenteredUpdate(buffers, 0.3), 1, 2),
    (lambda *buffers: UncenteredUpdate(buffers, Average(0.1, 3)), 1, 2),
    (lambda *buffers: PowerUpdate(buffers, 0.1, 0.2, False), 2, 5),
    (lambda *buffers: PowerUpdate(buffers, Average(), 0.2, True), 2, 5),
)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["none", "one", "many", "infinite"])
@pytest.mark.parametrize("width", [1, 17, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("update", UPDATES, ids=range(len(UPDATES)))
def test_update(kind: str, width: int, dtype: torch.dtype, update: Any) -> None:
    make_update, buffers, rows = update
    torch.manual_seed(width)
    sums = torch.rand(rows, width, dtype=torch.float64) * 50
    sums[0] = sums[2 if rows == 5 else 0] = {"none": 0, "one": 1}.get(kind, 40)
    # Somewhere larger than 1/m_b, where the floor of ν's factor counts.
    sums[min(rows - 1, 3)] *= 40
    if kind == "infinite":
        sums[-1, 0] = sums[1, -1] = float("inf")
        sums[-1, width // 2] = float("nan")
    state = [torch.rand(width, dtype=dtype, device=DEVICE) for _ in range(buffers)]
    state += [torch.tensor(value, device=DEVICE) for value in (7, 2)]
    expected = [buffer.clone() for buffer in state]
    with np.errstate(all="ignore"):
        kernels.update_running_stats(make_update(*state), sums.to(DEVICE))
    eager.update_running_stats(make_update(*expected), sums.to(DEVICE))
    for mine, theirs in zip(state, expected, strict=True):
        tolerance = 4 * torch.finfo(dtype).eps
        # Sums are in float64, up to 50, and a GPU multiplies and adds in one operation.
        floor = max(tolerance, 200 * torch.finfo(torch.float64).eps)
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_whole_weight_takes_the_new_value_as_it_is(dtype: torch.dtype) -> None:
    sums = torch.tensor([[4.0], [4.0], [4.0], [4.0]], dtype=torch.float64, device=DEVICE)
    mean, var = (torch.full((1,), 1e30, dtype=dtype, device=DEVICE) for _ in range(2))
    counters = [torch.tensor(0, device=DEVICE) for _ in range(2)]
    kernels.update_running_stats(CenteredUpdate((mean, var, *counters), 1.0, False), sums)
    assert (mean.item(), var.item()) == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 1000, 1024])
@pytest.mark.parametrize("check_op", CHECKS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_large(check_op: Callable[[Case], None], dtype: torch.dtype, width: int) -> None:
    for groups in (0, 1, 8):
        mask = None if check_op in (check_static, check_token) else "some"
        fixed = {"dtype": dtype, "width": width, "groups": groups, "tokens": 20_011}
        check_op(Case(5, "cuda", mask=mask, **fixed))


@pytest.mark.gpu
def test_more_than_2_to_31_elements() -> None:
    """The last rows are where 32 bits of an offset would have ended."""
    x = torch.ones(2**21 + 3, 1024, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3
    second_moment = torch.full((1024,), 1.0 - 1e-5, device="cuda")
    state = second_moment, second_moment, None
    args = PowerNormArgs(x, None, None, None, None, *state, 0, 1e-5, False, 0.0, False, "")
    output = kernels.power_norm(args)
    assert output.y[-1].eq(3).all()
    assert output.y[:-1].eq(1).all()
    expected = torch.full((1024,), 2.0**21 + 2 + 9, dtype=torch.float64, device="cuda")
    torch.testing.assert_close(output.sums[1], expected)
