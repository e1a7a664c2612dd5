"""Compiles Triton's programs for GPUs that need not be there, without running any.

Started by test_programs.py in a process without Triton's interpreter. Tensors on torch's
meta device stand for those of a GPU. Reads rows (JSON, a list of `Row`) from its input and writes
what each program takes, one JSON a line.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from powernorm.ops.batch_norm import BatchNormArgs, BatchNormBackwardArgs
from powernorm.ops.kernels import triton as kernels
from powernorm.ops.kernels.triton.launch import DeviceLimits
from powernorm.ops.power_norm import PowerNormArgs, PowerNormBackwardArgs
from powernorm.ops.running_stats import Average, CenteredUpdate, PowerUpdate, UncenteredUpdate
from powernorm.ops.static_norm import StaticNormArgs, StaticNormBackwardArgs
from powernorm.ops.token_norm import TokenNormArgs, TokenNormBackwardArgs

FOLDER = "powernorm.ops.kernels.triton"
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.int64: "*i64",
}

# What such devices say of themselves: processors, bytes of shared memory of a block, warp, threads.
DEVICES = {
    "sm_75": (GPUTarget("cuda", 75, 32), DeviceLimits(40, 64 << 10, 32, 1024, False)),
    "sm_80": (GPUTarget("cuda", 80, 32), DeviceLimits(108, 163 << 10, 32, 1024, True)),
    "sm_86": (GPUTarget("cuda", 86, 32), DeviceLimits(84, 99 << 10, 32, 1024, True)),
    "sm_89": (GPUTarget("cuda", 89, 32), DeviceLimits(128, 99 << 10, 32, 1024, True)),
    "sm_90": (GPUTarget("cuda", 90, 32), DeviceLimits(132, 227 << 10, 32, 1024, True)),
    "sm_100": (GPUTarget("cuda", 100, 32), DeviceLimits(148, 227 << 10, 32, 1024, True)),
    "sm_120": (GPUTarget("cuda", 120, 32), DeviceLimits(170, 99 << 10, 32, 1024, True)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), DeviceLimits(304, 64 << 10, 64, 1024, False)),
}


class Row(NamedTuple):
    """A program to compile, and its settings."""

    device: str
    op: str
    """`batch`, `power`, `static`, `token` or `update`."""
    dtype: str
    width: int
    groups: int
    residual: bool
    extras: bool
    """Mask, γ, and the other options that make programs larger."""


class Compiler:
    """In place of `launch.launch`: compiles what the launch would, for one device."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.target, self.limits = DEVICES[row.device]

    def __call__(
        self, kernel: Any, plan: Any, _: torch.device, *args: Any, **constants: Any
    ) -> None:
        values = {**constants, **plan.constants}
        options = {name: values.pop(name) for name in ("num_warps", "enable_fp_fusion")}
        source = ASTSource(kernel, *specialize(kernel, args, values))
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            result = triton.compile(source, target=self.target, options=options)
        # Static and dynamic shared memory of one block of threads.
        shared, threads = result.metadata.shared, options["num_warps"] * self.limits.warp_size
        spilled = self._spilled(result, log.getvalue())
        room = {"shared_limit": self.limits.shared_memory, "most_threads": self.limits.max_threads}
        figures = {"shared": shared, "threads": threads, "spilled": spilled, **room}
        names = {"kernel": kernel.__name__, **self.row._asdict()}
        sys.stdout.write(json.dumps(names | figures) + "\n")

    def _spilled(self, result: Any, log: str) -> int:
        """Bytes that each thread moves out of its registers."""
        if self.target.backend == "hip":
            return 4 * int(re.search(r"\.vgpr_spill_count:\s*(\d+)", result.asm["amdgcn"])[1])
        # A program compiled before comes from Triton's cache without ptxas's log.
        found = re.search(r"(\d+) bytes spill stores", log or self._assemble(result.asm["ptx"]))
        return int(found[1])

    def _assemble(self, ptx: str) -> str:
        arch = self.target.arch
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            name = f"--gpu-name={sm_arch_from_capability(arch)}"
            command = [get_ptxas(arch).path, "-v", "--regAllocOptLevel=2", name, file.name]
            command += ["-o", "/dev/null"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def specialize(kernel: Any, args: Any, values: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(types, constants, attributes) of a kernel's parameters, as a launch would find them."""
    given = iter(args)
    types, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name) if parameter.is_constexpr else next(given)
        if parameter.is_constexpr or value is None:
            types[parameter.name], constexprs[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            types[parameter.name] = POINTERS[value.dtype]
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
    return types, constexprs, attributes


def vectors(features: int, *leading: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*leading, features, dtype=dtype, device="meta")


def compile_op(row: Row) -> None:
    """An op forward and backward, with or without mask, residual, γ, and the other options."""
    dtype, extras, groups = getattr(torch, row.dtype), row.extras, row.groups
    x = torch.empty(32768, row.width, dtype=dtype, device="meta")
    mask = torch.empty(32768, dtype=torch.bool, device="meta") if extras else None
    residual = x if row.residual else None
    v = vectors(row.width)
    weight = v if extras else None
    affine = mask, weight, weight
    if row.op == "batch":
        limits = vectors(2) if extras else None
        seen = vectors(row.width, 6) if extras else None
        batch = kernels.batch_norm(
            BatchNormArgs(x, residual, *affine, v, v, None, limits, groups, 1e-5, extras, "")
        )
        known = (batch.scales, batch.statistics, 1e-5, extras, True, "")
        kernels.batch_norm_backward(
            BatchNormBackwardArgs(x, residual, seen, x, mask, weight, *known)
        )
        uncentered = None, v, None, None
        kernels.batch_norm(
            BatchNormArgs(x, residual, mask, weight, None, *uncentered, groups, 1e-5, extras, "")
        )
    elif row.op == "power":
        ratio = 2.0 * (extras and not row.residual)
        power = kernels.power_norm(
            PowerNormArgs(x, residual, *affine, v, v, None, groups, 1e-5, False, ratio, extras, "")
        )
        measured = (power.scales, power.statistics, power.sums, extras)
        kernels.power_norm_backward(PowerNormBackwardArgs(x, residual, x, mask, weight, *measured))
    elif row.op == "static":
        static = kernels.static_norm(
            StaticNormArgs(x, residual, weight, weight, weight, v, groups, 1e-5, extras)
        )
        kernels.static_norm_backward(
            StaticNormBackwardArgs(x, residual, x, weight, static.scales, static.statistics)
        )
    else:
        shape = (not extras, extras, 1.0, 0.1 * extras)
        args = TokenNormArgs(
            x, residual, weight, weight, max(groups, 1), not extras, 1e-5, extras, 1.0, 0.1 * extras
        )
        token = kernels.token_norm(args)
        kernels.token_norm_backward(
            TokenNormBackwardArgs(
                x, residual, x, weight, token.statistics, *shape, False, False, not extras
            )
        )


def compile_updates(row: Row) -> None:
    """The updates of running statistics."""
    v = vectors(row.width, dtype=getattr(torch, row.dtype))
    counter = torch.empty((), dtype=torch.int64, device="meta")
    sums = vectors(row.width, 5, dtype=torch.float64)
    counters, average = (counter, counter), Average() if row.extras else 0.1
    kernels.update_running_stats(CenteredUpdate((v, v, *counters), 0.1, row.extras), sums[:4])
    kernels.update_running_stats(UncenteredUpdate((v, *counters), Average()), sums[:2])
    kernels.update_running_stats(PowerUpdate((v, v, *counters), average, 0.1, row.extras), sums)


def main() -> None:
    knobs.nvidia.dump_ptxas_log = True
    for row in (Row(*values) for values in json.load(sys.stdin)):
        compiler = Compiler(row)
        for name in ("batch_norm", "power_norm", "running_stats", "static_norm", "token_norm"):
            importlib.import_module(f"{FOLDER}.{name}").launch = compiler  # type: ignore[attr-defined]
        launch = importlib.import_module(f"{FOLDER}.launch")
        launch.limits = lambda _, limits=compiler.limits: limits  # type: ignore[attr-defined]
        (compile_updates if row.op == "update" else compile_op)(row)


if __name__ == "__main__":
    main()
