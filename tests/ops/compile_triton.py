"""Compiles every Triton program for a GPU that need not be there, without running any.

Started by test_triton.py in a process without Triton's interpreter. Tensors on torch's meta device
stand for those of a GPU with 132 multiprocessors.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from powernorm.ops.batch_norm import BatchNormArgs, BatchNormBackwardArgs
from powernorm.ops.kernels import triton as kernels
from powernorm.ops.power_norm import PowerNormArgs, PowerNormBackwardArgs
from powernorm.ops.running_stats import CenteredUpdate, PowerUpdate, UncenteredUpdate
from powernorm.ops.static_norm import StaticNormArgs, StaticNormBackwardArgs
from powernorm.ops.token_norm import TokenNormArgs, TokenNormBackwardArgs

ROOM = "powernorm.ops.kernels.triton"
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.int64: "*i64",
}
compiled: set[str] = set()


def compile_launch(kernel: Any, plan: Any, _: torch.device, *args: Any, **constants: Any) -> None:
    """In place of `launch.launch`: what the launch would compile on an H100 or H200."""
    values = {**constants, **plan.constants}
    options = {name: values.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    given = iter(args)
    types, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name) if parameter.is_constexpr else next(given)
        if parameter.is_constexpr or value is None:
            types[parameter.name], constexprs[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            types[parameter.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            assert parameter.annotation_type == "fp64", parameter.name
            types[parameter.name] = "fp64"
        else:
            types[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    assert not values, values
    assert next(given, None) is None
    source = ASTSource(kernel, types, constexprs, attributes)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # Static and dynamic shared memory of one block of threads.
    assert result.metadata.shared <= 227 * 1024, (kernel.__name__, result.metadata.shared)
    compiled.add(kernel.__name__)


def vectors(features: int, *leading: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*leading, features, dtype=dtype, device="meta")


def compile_ops(dtype: torch.dtype, features: int, groups: int, extras: bool) -> None:
    """Every op once, with or without mask, residual, γ, and the other options."""
    tokens = 32768
    x = torch.empty(tokens, features, dtype=dtype, device="meta")
    mask = torch.empty(tokens, dtype=torch.bool, device="meta") if extras else None
    residual = x if extras else None
    v = vectors(features)
    weight = v if extras else None
    limits = vectors(2) if extras else None
    affine = mask, weight, weight
    batch = kernels.batch_norm(
        BatchNormArgs(x, residual, *affine, v, v, None, limits, groups, 1e-5, extras, "")
    )
    seen = vectors(features, 6) if extras else None
    known = batch.scales, batch.statistics
    kernels.batch_norm_backward(
        BatchNormBackwardArgs(x, residual, seen, x, mask, weight, *known, 1e-5, extras, True, "")
    )
    kernels.batch_norm(
        BatchNormArgs(
            x, residual, mask, weight, None, None, v, None, None, groups, 1e-5, extras, ""
        )
    )
    bound = 2.0 * extras
    power = kernels.power_norm(
        PowerNormArgs(x, residual, *affine, v, v, None, groups, 1e-5, False, bound, extras, "")
    )
    measured = power.scales, power.statistics, power.sums
    kernels.power_norm_backward(
        PowerNormBackwardArgs(x, residual, x, mask, weight, *measured, extras)
    )
    static = kernels.static_norm(
        StaticNormArgs(x, residual, weight, weight, weight, v, groups, 1e-5, extras)
    )
    kernels.static_norm_backward(
        StaticNormBackwardArgs(x, residual, x, weight, static.scales, static.statistics)
    )
    shape = not extras, 1e-5, extras, 1.0, 0.1 * extras
    token = kernels.token_norm(TokenNormArgs(x, residual, weight, weight, max(groups, 1), *shape))
    kernels.token_norm_backward(
        TokenNormBackwardArgs(
            x, residual, x, weight, token.statistics, not extras, extras, 1.0, 0.1 * extras,
            False, False, not extras,
        )
    )  # fmt: skip


def compile_updates(features: int, dtype: torch.dtype) -> None:
    """The updates of running statistics."""
    v = vectors(features, dtype=dtype)
    counter = torch.empty((), dtype=torch.int64, device="meta")
    sums = vectors(features, 5, dtype=torch.float64)
    counters = counter, counter
    kernels.update_running_stats(CenteredUpdate((v, v, *counters), 0.1, True), sums[:4])
    kernels.update_running_stats(UncenteredUpdate((v, *counters), None), sums[:2])
    kernels.update_running_stats(PowerUpdate((v, v, *counters), None, 0.1, True), sums)


def main() -> None:
    for name in ("batch_norm", "power_norm", "running_stats", "static_norm", "token_norm"):
        importlib.import_module(f"{ROOM}.{name}").launch = compile_launch  # type: ignore[attr-defined]
    importlib.import_module(f"{ROOM}.launch").processors = lambda _: 132  # type: ignore[attr-defined]
    compile_updates(1024, torch.float32)
    compile_ops(torch.bfloat16, 1024, 1, False)
    if sys.argv[1:] == ["all"]:
        compile_others()
    sys.stdout.write(" ".join(sorted(compiled)))


def compile_others() -> None:
    """Further types and widths: about 20 s more."""
    compile_ops(torch.float32, 1024, 0, True)
    compile_ops(torch.float16, 513, 3, True)
    compile_ops(torch.float64, 768, 12, True)
    compile_ops(torch.float32, 16384, 1, False)
    compile_updates(4096, torch.float32)
    compile_updates(3, torch.float64)


if __name__ == "__main__":
    main()
