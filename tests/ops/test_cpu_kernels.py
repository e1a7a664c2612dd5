"""The CPU kernels against the reference: types, widths, masks, strides, instruction sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.backends import OPS, Problem, check, every_option, make, option_id
from powernorm.ops import eager
from powernorm.ops.batch_norm import BatchNormArgs
from powernorm.ops.kernels import cpu
from powernorm.ops.kernels.cpu.loading import load_library
from powernorm.ops.running_stats import (
    Average,
    CenteredUpdate,
    PowerUpdate,
    UncenteredUpdate,
    centered_sums,
)

TYPES = (torch.float32, torch.bfloat16, torch.float64)
every_op = pytest.mark.parametrize(("op", "options"), list(every_option()), ids=option_id)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so what is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["plain", "avx2", "avx512"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each one that this machine has; the best twice where it lacks one."""
    library = load_library().functions
    assert library is not None
    best = load_library().instruction_set
    library.powernorm_use_instruction_set(request.param.encode())
    yield request.param
    assert library.powernorm_use_instruction_set(best.encode())


def test_the_library_is_built_here() -> None:
    library = load_library()
    assert library.functions is not None, library.reason
    assert library.functions.powernorm_uses_openmp()


@pytest.mark.thinned
@every_op
@pytest.mark.parametrize("dtype", TYPES)
def test_instruction_sets(
    op: str, options: dict[str, Any], dtype: torch.dtype, instruction_set: str
) -> None:
    del instruction_set
    check(cpu, op, Problem(dtype=dtype, options=options))
    check(cpu, op, Problem(130, 64, dtype, groups=4, residual=True, options=options))


@pytest.fixture(params=[1, 20_000])
def outputs_past_the_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """As for the largest inputs, whatever the size; or some so, some not."""
    library = load_library().functions
    assert library is not None
    before = library.powernorm_set_stream_bytes(request.param)
    yield
    library.powernorm_set_stream_bytes(before)


def test_outputs_go_past_the_cache_on_processors_of_amd_alone() -> None:
    processors = Path("/proc/cpuinfo")
    if not processors.exists():
        pytest.skip("the system does not say whose processor this is")
    library = load_library().functions
    assert library is not None
    ordinary = 1 << 60
    before = library.powernorm_set_stream_bytes(ordinary)
    library.powernorm_set_stream_bytes(before)
    assert (before < ordinary) == ("AuthenticAMD" in processors.read_text())


@pytest.mark.thinned
@every_op
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.usefixtures("outputs_past_the_cache")
def test_outputs_past_the_cache(
    op: str, options: dict[str, Any], dtype: torch.dtype, instruction_set: str
) -> None:
    """Rows, and groups of features, that begin and end at the edge of a vector, or do not."""
    del instruction_set
    for features, groups in ((48, 4), (96, 4), (80, 2), (192, 8), (128, 2)):
        check(cpu, op, Problem(70, features, dtype, "some", groups, options=options))
    for features in (64, 17, 40):
        for tokens, groups, masked in ((130, 0, "none"), (139, 0, "some"), (70, 1, "some")):
            check(cpu, op, Problem(tokens, features, dtype, masked, groups, options=options))
            added = Problem(tokens, features, dtype, masked, groups, residual=True, options=options)
            check(cpu, op, added)


@pytest.mark.thinned
@every_op
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("features", [1, 3, 17, 513])
def test_widths_and_tokens(
    op: str, options: dict[str, Any], dtype: torch.dtype, features: int
) -> None:
    if op == "token_norm" and features == 1:
        # A token of one feature has no spread: only what does not divide by it is defined.
        options = {**options, "released": False}
    for tokens in (0, 1, 2, 5, 200):
        check(cpu, op, Problem(tokens, features, dtype, options=options))


@pytest.mark.thinned
@every_op
@pytest.mark.parametrize("masked", ["none", "some", "all", "first", "all but last"])
@pytest.mark.parametrize("groups", [0, 1, 4])
def test_masks_groups_residuals(op: str, options: dict[str, Any], masked: str, groups: int) -> None:
    for residual in (False, True):
        for strided in (False, True):
            problem = Problem(
                70, 12, torch.float32, masked, groups, residual, strided=strided, options=options
            )
            check(cpu, op, problem)


# Given statistics take no mask, and PowerNorm's released form averages over padding.
WITHOUT_PADDING = [
    (op, options)
    for op, options in every_option()
    if op != "static_norm" and not (op == "power_norm" and options.get("released"))
]


@pytest.mark.parametrize(("op", "options"), WITHOUT_PADDING, ids=option_id)
@pytest.mark.parametrize("groups", [0, 4])
def test_padding_may_hold_anything(op: str, options: dict[str, Any], groups: int) -> None:
    problem = Problem(70, 12, groups=groups, poisoned=True, options=options)
    check(cpu, op, problem)
    inputs = make(problem)
    gradients = {k: v for k, v in OPS[op](cpu, problem, inputs).items() if "back" in k}
    assert all(v.isfinite().all() for v in gradients.values())


@pytest.mark.parametrize("offset", [1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", ["none", "some"])
def test_large_offsets(offset: float, dtype: torch.dtype, masked: str) -> None:
    """Mean 1e4, spread 1: a one-pass sum of squares about 0 would have no right digit left."""
    for tokens in (64, 4096):
        problem = Problem(tokens, 33, dtype, masked, offset=offset)
        inputs = make(problem)
        var = OPS["batch_norm"](cpu, problem, inputs)["forward statistics"][1]
        wide = inputs.x.double() if inputs.mask is None else inputs.x.double()[~inputs.mask]
        expected = wide.var(0, unbiased=False)
        torch.testing.assert_close(var.double(), expected, rtol=3e-6, atol=0)


def test_an_outlier_in_the_first_row_costs_no_precision() -> None:
    """The first shift is a token; even when that token is far off."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4096, 20, generator=generator)
    x[0] = 3e3
    state = torch.zeros(20), torch.ones(20), None, None
    out = cpu.batch_norm(BatchNormArgs(x, None, None, None, None, *state, 0, 1e-5, False, ""))
    expected = x.double().var(0, unbiased=False)
    torch.testing.assert_close(out.statistics[1].double(), expected, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_do_not_change_the_result(threads: int) -> None:
    problem = Problem(2000, 65, torch.float64, options={})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for op in OPS:
            check(cpu, op, problem)
    finally:
        torch.set_num_threads(before)


def test_refused_arguments_are_an_error_and_nothing_is_written() -> None:
    from powernorm.ops.kernels.cpu.calls import run
    from powernorm.ops.kernels.cpu.tasks import BATCH_NORM, KernelTask

    with pytest.raises(RuntimeError, match="refused"):
        run(BATCH_NORM, KernelTask())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_running_statistics(wide: bool, seed: int) -> None:
    """The same moves as the reference, non-finite features and empty batches among them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if wide else torch.float32

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = torch.full((1, 9), float([5, 0, 1, 300][seed]), dtype=torch.float64)
    squares = torch.cat([count, noise(1, 9).square() * 40])
    uses = [centered_sums(count[0] / 2, noise(9) + t, squares[1]) for t in range(2)]
    sums = uses[0] + uses[1]
    power = torch.cat([squares, squares, noise(1, 9)])
    if seed == 3:
        sums[1, 2] = sums[2, 4] = squares[1, 5] = power[4, 1] = float("inf")
        power[1, 3] = float("nan")
    for make_update, num_buffers, given in (
        (lambda *b: CenteredUpdate(b, 0.1, bool(seed % 2)), 2, sums),
        (lambda *b: CenteredUpdate(b, Average(), True), 2, sums),
        (lambda *b: UncenteredUpdate(b, 0.3), 1, squares),
        (lambda *b: UncenteredUpdate(b, Average(0.1, 3)), 1, squares),
        (lambda *b: PowerUpdate(b, (0.1, Average())[seed % 2], 0.2, bool(seed // 2)), 2, power),
    ):
        start = [noise(9).to(dtype).abs() for _ in range(num_buffers)]
        buffers = [*start, torch.tensor(7), torch.tensor(2)]
        expected = [t.clone() for t in buffers]
        versions = [t._version for t in buffers]
        update = make_update(*buffers)
        for _ in range(2):  # the second time as it was prepared
            cpu.update_running_stats(update, given)
            eager.update_running_stats(make_update(*expected), given)
        for got, want in zip(buffers, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        if seed != 1:
            after = [t._version for t in buffers]
            assert all(b > a for a, b in zip(versions, after, strict=True))


def test_an_update_that_was_prepared_is_only_read() -> None:
    """Threads that train one layer share it: one would take the other's sums, perhaps freed."""
    buffers = (torch.zeros(3), torch.ones(3), torch.tensor(0), torch.tensor(0))
    update = CenteredUpdate(buffers, 1.0, False)
    prepared = []
    for mean in (2.0, 5.0):
        cpu.update_running_stats(
            update, centered_sums(torch.tensor(4.0), torch.full((3,), mean), torch.ones(3))
        )
        prepared.append(bytes(update.native[1]))
    assert buffers[0].tolist() == [5.0] * 3
    assert prepared[0] == prepared[1]


def test_an_update_follows_the_memory_of_its_buffers() -> None:
    """`tensor.data = …`, as of a wrapper that shards, leaves the tensor and moves its values."""
    buffers = [torch.zeros(3), torch.ones(3), torch.tensor(0), torch.tensor(0)]
    update = CenteredUpdate(tuple(buffers), 1.0, False)
    sums = centered_sums(torch.tensor(4.0), torch.full((3,), 2.0), torch.full((3,), 8.0))
    cpu.update_running_stats(update, sums)
    left = buffers[0].data
    buffers[0].data = torch.zeros(3)
    left.fill_(7)
    cpu.update_running_stats(update, sums)
    assert buffers[0].tolist() == [2.0] * 3
    assert left.tolist() == [7.0] * 3
    buffers[1].data = torch.zeros(3, dtype=torch.bfloat16)
    cpu.update_running_stats(update, sums)
    assert buffers[1].tolist() == [2.0] * 3
