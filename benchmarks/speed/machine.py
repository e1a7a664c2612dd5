"""The machine of a run, and an allocator that does not stand in the way of any provider."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any, Final

import torch

import powernorm
from powernorm.ops.kernels.cpu.loading import load_library

ALLOCATOR: Final = {
    # glibc gives large blocks back at every free, and the page faults of the next allocation cost
    # more than a norm. The same for all providers.
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
_QUIET: Final = {
    # torch's profiler counts the memory on the CPU. It would say each time that it starts, and
    # where a block is freed that was there before it.
    "KINETO_LOG_LEVEL": "6",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def restart() -> None:
    """Replace this process by one with `ALLOCATOR` and quiet logs, unless it has them."""
    if not ALLOCATOR.keys() <= os.environ.keys():
        command = [sys.executable, *sys.argv]
        os.execve(sys.executable, command, _QUIET | os.environ | ALLOCATOR)


def describe_machine() -> dict[str, Any]:
    """Return what a reader needs to place the figures."""
    library = load_library()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": (*names, platform.processor() or platform.machine())[0],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "powernorm": powernorm.__version__,
        "cpu_kernels": library.instruction_set if library.functions else library.reason,
    }


def count_preemptions() -> int:
    """Return how often this process has lost a core to others."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
