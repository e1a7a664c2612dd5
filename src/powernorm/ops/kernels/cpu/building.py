"""Build of the CPU kernels: a shared library with a plain C interface, from `source/`.

`setup.py` calls this when the package is installed, and a test for its sanitizer run. Only the
standard library is imported, because nothing else is installed at that time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

SOURCE: Final = Path(__file__).with_name("source")
LIBRARY_NAME: Final = "libpowernorm.cpu.so"
NOTE_NAME: Final = "not_built.txt"
"""File that is written in place of the library when it cannot be built, with the reason."""

_COMMON: Final = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)
_INSTRUCTION_SETS: Final = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ),
}


class BuildError(Exception):
    """The kernels cannot be built on this machine; the message has the reason."""


def number_sources() -> str:
    """Return a digest of the current sources, to recognize a library built from other ones."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_library(target: Path, sanitize: str = "") -> None:
    """Compile and link the kernels.

    Each instruction set is one compilation of the same source; which one runs is chosen when the
    library is loaded, so a wheel serves machines other than the one that built it.

    Args:
        target: file to write.
        sanitize: value of the compiler's -fsanitize, for tests.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    compiler = _compiler()
    # Sanitizers make compiling much slower, so less optimization is requested.
    checks = (f"-fsanitize={sanitize}", "-g", "-fno-omit-frame-pointer", "-O1")
    extra = checks if sanitize else ()
    wide = {name for name in ("avx2", "avx512") if _takes(compiler, _INSTRUCTION_SETS[name])}
    openmp = ("-fopenmp",) if _takes(compiler, ("-fopenmp",)) else ()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        jobs = [
            (
                [*_COMMON, *extra, *openmp, *flags, f"-DPOWERNORM_ISA={name}"],
                SOURCE / "kernels.cpp",
                place / f"{name}.o",
            )
            for name, flags in _INSTRUCTION_SETS.items()
            if name == "plain" or name in wide
        ]
        known = [f"-DPOWERNORM_HAS_{name.upper()}" for name in sorted(wide)]
        known.append(f'-DPOWERNORM_SOURCES="{number_sources()}"')
        face = ([*_COMMON, *extra, *openmp, *known], SOURCE / "interface.cpp", place / "face.o")
        jobs.append(face)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _compile(compiler, *job), jobs))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A process that has mapped the old library keeps it: the new file gets a new inode.
        finished = target.with_name(target.name + ".new")
        _run(
            [*compiler, "-shared", *extra, *(str(job[2]) for job in jobs), *_link(sanitize)],
            finished,
        )
        finished.replace(target)


def _link(sanitize: str) -> list[str]:
    # -fopenmp is missing on purpose: the OpenMP runtime is torch's, found when the library is
    # loaded. A second runtime would create a second pool of threads.
    if sys.platform == "darwin":
        return ["-undefined", "dynamic_lookup"]
    return ["-lm"] if sanitize else ["-nodefaultlibs", "-lc", "-lm", "-lgcc"]


def _compiler() -> list[str]:
    if os.name == "nt":
        raise BuildError("the kernels have been written for GCC and Clang, not for Windows")
    named = shlex.split(os.environ.get("CXX", ""))
    for command in (named, ["c++"], ["g++"], ["clang++"]):
        if command and shutil.which(command[0]):
            return command
    raise BuildError("no C++ compiler (c++, g++ or clang++; CXX names another)")


def _takes(compiler: list[str], flags: tuple[str, ...]) -> bool:
    """Return whether the compiler accepts these flags on this machine."""
    vector = any(flag.startswith("-mavx") for flag in flags)
    if vector and platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    probe = [*compiler, *flags, "-x", "c++", "-fsyntax-only", "-"]
    answer = subprocess.run(
        probe, input="int main() {}", capture_output=True, text=True, check=False
    )
    return answer.returncode == 0


def _compile(compiler: list[str], flags: list[str], source: Path, target: Path) -> None:
    _run([*compiler, *flags, "-c", str(source)], target)


def _run(command: list[str], target: Path) -> None:
    answer = subprocess.run(
        [*command, "-o", str(target)], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if "error" in line] or [answer.stderr]
        raise BuildError(f"{shlex.join(command[:1])} failed: {lines[0].strip()}")


def build_or_note(folder: Path) -> str | None:
    """Build the library into a folder, or write a note there with the reason why not.

    Args:
        folder: where the package looks for the library.

    Returns:
        The reason if nothing was built.
    """
    library, note = folder / LIBRARY_NAME, folder / NOTE_NAME
    note.unlink(missing_ok=True)
    try:
        build_library(library)
    except (BuildError, OSError) as error:
        library.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{error}\n", encoding="utf-8")
        return str(error)
    return None
