"""Starts a benchmark in a process with an allocator that does not stand in the way."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final, NoReturn

from powernorm.errors import InputError

ALLOCATOR: Final = {
    # glibc gives large blocks back at every free, and the page faults of the next allocation cost
    # more than a norm. The same for all providers.
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}


def start_benchmark(settings: dict[str, Any]) -> NoReturn:
    """Replaces this process by the benchmark's.

    Args:
        settings: of `powernorm.benchmarking.__main__.run`.

    Raises:
        InputError: settings that cannot be run.
    """
    check_settings(settings)
    sys.stdout.flush()
    command = [sys.executable, "-m", "powernorm.benchmarking", json.dumps(settings)]
    os.execve(sys.executable, command, os.environ | ALLOCATOR)


def check_settings(settings: dict[str, Any]) -> None:
    """Raises before anything is run.

    Raises:
        InputError: an unknown preset, norm or device.
    """
    import torch

    from powernorm.benchmarking.cases import GRIDS
    from powernorm.benchmarking.providers import NORMS as BENCHMARKED
    from powernorm.benchmarking.steps import STEP_NORMS
    from powernorm.norms import NORMS

    if settings["show"]:
        if settings["out"]:
            raise InputError("--show measures nothing, so there are no rows for --out: drop one")
        return
    preset, norms = settings["preset"], settings["norms"] or []
    presets = (*GRIDS, "step", "inference")
    if preset not in presets:
        raise InputError(f"preset is {preset!r}, expected one of {', '.join(presets)}")
    if preset == "inference":
        _check_inference(settings)
        return
    known = NORMS if preset == "step" else BENCHMARKED
    for norm in norms:
        if norm not in known:
            raise InputError(f"norm {norm!r} has no benchmark; those that have: {', '.join(known)}")
    if preset == "step" and settings["device"] != "cpu":
        raise InputError(f"the preset 'step' ({', '.join(STEP_NORMS)}) runs on the CPU only")
    if settings["device"] == "cuda" and not torch.cuda.is_available():
        raise InputError("device is 'cuda', but torch sees no CUDA device: use --device cpu")
    if settings["device"] not in ("cpu", "cuda"):
        raise InputError(f"device is {settings['device']!r}, expected cpu or cuda")


def _check_inference(settings: dict[str, Any]) -> None:
    from powernorm.benchmarking.inference.encoders import KINDS
    from powernorm.benchmarking.inference.engines import check_extra

    given = [name for name in ("norms", "eager", "compiled") if settings[name]]
    if given:
        raise InputError(
            f"the preset 'inference' compares {', '.join(KINDS)}: drop --{given[0]}, which it "
            "does not take"
        )
    if settings["device"] != "cpu":
        raise InputError("the preset 'inference' runs on the CPU only: drop --device")
    check_extra()
