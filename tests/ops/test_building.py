"""The build of the CPU kernels: reasons for failures, and the replacement; sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from powernorm.ops.kernels.cpu.building import (
    LIBRARY_NAME,
    NOTE_NAME,
    BuildError,
    build_library,
    build_or_note,
)
from powernorm.ops.kernels.cpu.loading import FOLDER, load_library

ROOT = Path(__file__).parents[2]


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "2"} | variables,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
    )


def test_without_a_compiler_a_note_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / LIBRARY_NAME).write_text("of an earlier build")
    reason = build_or_note(tmp_path)
    assert reason is not None
    assert "no C++ compiler" in reason
    assert (tmp_path / NOTE_NAME).read_text().strip() == reason
    assert not (tmp_path / LIBRARY_NAME).exists()


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="false failed"):
        build_library(tmp_path / LIBRARY_NAME)
    assert list(tmp_path.iterdir()) == []


def test_without_kernels_the_package_works_and_says_why(tmp_path: Path) -> None:
    (tmp_path / NOTE_NAME).write_text("no C++ compiler (c++, g++ or clang++)\n")
    code = """
import torch, powernorm, warnings
x = torch.randn(6, 4, requires_grad=True)
norm = powernorm.PowerNorm(4)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    norm(x).sum().backward()
    powernorm.BatchNorm(4)(x).sum().backward()
assert len(seen) == 1, seen
print(seen[0].message)
assert int(norm.num_batches_tracked) == 1
choice = powernorm.ops.explain(x, "power_norm")[0]
assert choice.backend == "eager", choice
print(choice.others["cpu"])
try:
    with powernorm.ops.use_backend("cpu"):
        pass
except powernorm.InputError as error:
    print(error)
"""
    done = run(code, POWERNORM_CPU_LIBRARY=str(tmp_path / LIBRARY_NAME))
    assert done.returncode == 0, done.stderr
    warned, explained, refused = done.stdout.splitlines()
    assert warned.startswith("eager torch serves the norms")
    assert "POWERNORM_BACKEND=eager" in warned
    for line in (warned, explained, refused):
        assert "no C++ compiler" in line
        assert "install" in line
    assert refused.startswith("backend 'cpu' is not available here")


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """One that lacks the functions, and a file that is no library."""
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int powernorm_run() { return 0; }')
    library = tmp_path / "other.so"
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", library], check=True)
    text = tmp_path / "text.so"
    text.write_text("no library")
    for path in (library, text):
        code = "import torch, powernorm; print(powernorm.ops.explain(torch.ones(2, 2))[0])"
        done = run(code, POWERNORM_CPU_LIBRARY=str(path))
        assert done.returncode == 0, done.stderr
        assert "batch_norm: eager" in done.stdout
        assert f"{path.name} cannot be loaded" in done.stdout


def test_a_library_that_is_cut_off_is_not_loaded(tmp_path: Path) -> None:
    """To load it would end the process."""
    size = (FOLDER / LIBRARY_NAME).stat().st_size
    lengths = (0, 3, 20, 63, 64, 4096, size // 4, size // 2, size * 3 // 4, size - 1, size)
    code = f"""
import os, torch, powernorm
from powernorm.ops.kernels.cpu.loading import FOLDER, LIBRARY_NAME, VARIABLE, load_library
content = (FOLDER / LIBRARY_NAME).read_bytes()
for length in {lengths}:
    os.environ[VARIABLE] = r"{tmp_path}/" + f"{{length}}.so"
    with open(os.environ[VARIABLE], "wb") as file:
        file.write(content[:length])
    load_library.cache_clear()
    print(load_library().reason, flush=True)
os.environ[VARIABLE] = r"{tmp_path}/{size // 2}.so"
load_library.cache_clear()
try:
    powernorm.BatchNorm(4)(torch.ones(6, 4))
except UserWarning as warning:
    print(warning)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    *cut, intact, warned = done.stdout.splitlines()
    assert intact == f"{size}.so is loaded"
    assert warned.startswith("eager torch serves the norms")
    assert len(cut) == len(lengths) - 1
    for line in (*cut, warned):
        assert "cannot be loaded" in line
        assert "reinstall powernorm" in line


def test_kernels_share_the_threads_of_torch() -> None:
    """No second OpenMP runtime in the process, and as many threads as torch is told to use."""
    code = """
import os, torch, powernorm
from pathlib import Path
def threads():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
torch.randn(2000, 2000).exp()
before = threads()
x = torch.randn(4096, 512)
powernorm.BatchNorm(512)(x)
assert threads() == before, (threads(), before)
names = {Path(line.split()[-1]).name for line in open("/proc/self/maps") if "omp" in line}
runtimes = {name for name in names if name.startswith(("libgomp", "libomp", "libiomp"))}
assert len(runtimes) == 1, runtimes
"""
    done = run(code, POWERNORM_BACKEND="cpu")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the library with checks, the runtime that must be loaded first)."""
    library = tmp_path_factory.mktemp("sanitized") / LIBRARY_NAME
    build_library(library, sanitize="address,undefined")
    answer = subprocess.run(
        ["c++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    return library, Path(answer.stdout.strip()).resolve()


@pytest.mark.slow
@pytest.mark.whole
def test_sanitizers_find_nothing(sanitized: tuple[Path, Path]) -> None:
    """The whole suite of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""
    library, runtime = sanitized
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider"),
            str(ROOT / "tests" / "ops" / "test_cpu_kernels.py"),
        ],
        env=os.environ
        | {
            "LD_PRELOAD": str(runtime),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "POWERNORM_CPU_LIBRARY": str(library),
        },
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "runtime error" not in done.stdout + done.stderr


@pytest.mark.slow
def test_sanitizers_would_find_something(sanitized: tuple[Path, Path]) -> None:
    """A row too many, on purpose."""
    library, runtime = sanitized
    code = """
import sys
import torch
from powernorm.ops.kernels.cpu import calls, token_norm
from powernorm.ops.token_norm import TokenNormArgs
real = calls.library().powernorm_run
x = torch.randn(2000, 64)
calls.run = None
def lie(operation, task):
    task.tokens += 1
    import ctypes
    return real(operation, ctypes.byref(task))
sys.modules[token_norm.__module__].run = lie
token_norm(TokenNormArgs(x, None, None, None))
"""
    done = run(
        code,
        LD_PRELOAD=str(runtime),
        ASAN_OPTIONS="detect_leaks=0",
        POWERNORM_CPU_LIBRARY=str(library),
        PYTHONMALLOC="malloc",
    )
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr


def test_the_loaded_library_is_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POWERNORM_CPU_LIBRARY", raising=False)
    assert LIBRARY_NAME in load_library().reason
