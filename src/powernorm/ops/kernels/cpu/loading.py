"""Loading of the library of CPU kernels, with torch's OpenMP threads."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch  # noqa: F401 - brings the OpenMP runtime that the library uses

from powernorm.ops.kernels.cpu.building import LIBRARY_NAME, NOTE_NAME, number_sources
from powernorm.ops.kernels.cpu.tasks import KernelTask, NativeUpdate

FOLDER = Path(__file__).parent
VARIABLE = "POWERNORM_CPU_LIBRARY"
"""Environment variable that names another file to load."""
_HEADER: Final = 64
"""Bytes of an ELF file's header."""


@dataclass(frozen=True)
class Library:
    """The loaded library, or the reason why there is none."""

    functions: ctypes.CDLL | None
    reason: str

    @property
    def instruction_set(self) -> str:
        """Name of the instruction set of the kernels in use: avx512, avx2 or plain."""
        assert self.functions is not None
        name: bytes = self.functions.powernorm_instruction_set()
        return name.decode()

    @property
    def uses_openmp(self) -> bool:
        """Whether the kernels use several threads."""
        assert self.functions is not None
        return bool(self.functions.powernorm_uses_openmp())


@cache
def load_library() -> Library:
    """Load the library once, or return the reason why it is missing."""
    path = Path(os.environ.get(VARIABLE) or FOLDER / LIBRARY_NAME)
    if not path.exists():
        note = path.with_name(NOTE_NAME)
        why = note.read_text(encoding="utf-8").strip() if note.exists() else "it was never built"
        fix = "install a C++ compiler, then reinstall powernorm"
        return Library(None, f"the kernels are missing: {why}; {fix}")
    try:
        _check_length(path)
        functions = _open(path)
        _declare(functions)
        if VARIABLE not in os.environ:
            _check_sources(functions)
    except (OSError, AttributeError, ValueError) as error:
        return Library(None, f"{path.name} cannot be loaded: {error}; reinstall powernorm")
    return Library(functions, f"{path.name} is loaded")


def _check_length(path: Path) -> None:
    """Raise a ValueError for a truncated ELF file: loading it would kill the process.

    The section table is the last part of the file.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER)
    if header[:5] != b"\x7fELF\x02":  # torch has wheels for 64 bits only
        return
    size, needed = path.stat().st_size, _HEADER
    if size >= _HEADER:
        order = "<" if header[5] == 1 else ">"
        start, entry, number = struct.unpack_from(f"{order}40xQ10xHH", header)
        needed = start + entry * number
    if size < needed:
        raise ValueError(f"it is truncated after {size:,} bytes")


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "GOMP" not in str(error) and "omp_" not in str(error):
            raise
        # The runtime is loaded, but its names are not global: make them global and try again.
        runtime = _mapped_openmp()
        if runtime is None:
            raise
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
        return ctypes.CDLL(str(path))


def _mapped_openmp() -> str | None:
    """Return the file of the OpenMP runtime that this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            return f"/{path}"
    return None


def _check_sources(functions: ctypes.CDLL) -> None:
    functions.powernorm_sources.restype = ctypes.c_char_p
    if functions.powernorm_sources().decode() != number_sources():
        raise ValueError("its sources have changed since it was built")


def _declare(functions: ctypes.CDLL) -> None:
    functions.powernorm_task_size.restype = ctypes.c_size_t
    functions.powernorm_update_size.restype = ctypes.c_size_t
    sizes = (functions.powernorm_task_size(), functions.powernorm_update_size())
    if sizes != (ctypes.sizeof(KernelTask), ctypes.sizeof(NativeUpdate)):
        raise ValueError("it was built from other sources")
    functions.powernorm_run.argtypes = [ctypes.c_int, ctypes.c_void_p]
    functions.powernorm_update.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    functions.powernorm_instruction_set.restype = ctypes.c_char_p
    functions.powernorm_use_instruction_set.argtypes = [ctypes.c_char_p]
    functions.powernorm_set_stream_bytes.argtypes = [ctypes.c_int64]
    functions.powernorm_set_stream_bytes.restype = ctypes.c_int64
