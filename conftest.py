"""Settings of the whole suite: an empty home of its own, and one thread a process."""

import gc
import os
import re
import zlib
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import machine  # noqa: F401  (makes the suite's home)
from covering import covering

# oneDNN's AVX2 convolutions of few channels break the heap on some AMD processors, without any norm
# in the model (torch 2.13); it reads this when it is first used.
if torch.backends.cpu.get_cpu_capability() == "AVX2":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX")

# The suite runs in several processes at once: one thread each is faster than two in each other's
# way, and results do not depend on the machine's number of cores.
torch.set_num_threads(1)

# With torch and transformers in memory, looking for cycles took a fifth of the suite's time.
gc.set_threshold(20_000, 50, 50)

# A busy machine is no failure.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that is soon encoded, and not one of those that the package holds."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    lines = (
        f"The number {n} comes before {n + 1} and is {'even' if n % 2 == 0 else 'odd'}."
        for n in range(600)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


OPTIONAL = ["powernorm_lab", "powernorm_data", "transformers", "lightning", "onnx", "onnxruntime"]
OPTIONAL += ["openvino", "onnxscript", "triton", "peft", "x_transformers", "sentence_transformers"]
OPTIONAL += ["safetensors", "syrupy", "packaging", "accelerate", "datasets", "sphinx", "timm"]
OPTIONAL += ["matplotlib", "pandas", "PIL", "scipy"]
"""Packages whose absence skips the tests that import them: the core needs none of them."""

Report = Generator[None, Any, Any]
"""Type of a hook that sees another's report."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Report:
    """Skip a file whose import fails for a package that is not installed."""
    report = yield
    return _skipped(report, getattr(report, "call", None), str(collector.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Report:
    """Skip a test that fails for a package that is not installed."""
    return _skipped((yield), call, str(item.path))


def _skipped(report: Any, call: pytest.CallInfo[Any] | None, path: str) -> Any:
    error = call.excinfo.value if call is not None and call.excinfo else None
    while error is not None:
        package = str(getattr(error, "name", "")).partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in OPTIONAL:
            # An installed package that lacks a module of its own is a failure.
            if find_spec(package) is None:
                report.outcome = "skipped"
                report.longrepr = (path, 0, f"Skipped: {package} is not installed")
            break
        error = error.__cause__ or error.__context__
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="run only the K-th of N parts of the tests")
    parser.addoption("--whole", action="store_true", help="run grids whole, and what is so marked")


def pytest_configure(config: pytest.Config) -> None:
    # The default suite leaves out slow tests, whose snapshots are not unused. An option of syrupy.
    config.option.warn_unused_snapshots = True


def pytest_collection_finish() -> None:
    # Tests that collect garbage look through their own objects, not through what is imported.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin grids, and leave out other shards.

    Of a grid marked `thinned(strength)` the default suite runs a covering subset, what is slow a
    subset of one strength more, `--whole` all. Tests of one function stay together, since they may
    share what they need.
    """
    shard = config.getoption("--shard")
    if shard is not None:
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
        if match is None or int(match[1]) > int(match[2]):
            raise pytest.UsageError(f"--shard is {shard!r}, expected K/N such as 2/4")
        part, parts = int(match[1]) - 1, int(match[2])
        items[:] = [
            item
            for item in items
            if zlib.crc32(item.nodeid.partition("[")[0].encode()) % parts == part
        ]
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("thinned"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    whole = config.option.whole
    left_out = {id(item) for item in items if not whole and item.get_closest_marker("whole")}
    is_fast = "not slow" in config.option.markexpr
    for grid in grids.values():
        (strength,) = grid[0].get_closest_marker("thinned").args or (2,)  # type: ignore[union-attr]
        # Values are told apart as objects: not all can be compared, and rows share them.
        rows = [{axis: id(value) for axis, value in item.callspec.params.items()} for item in grid]
        kept = set(covering(rows, strength))
        for index, item in enumerate(grid):
            if index not in kept:
                item.add_marker(pytest.mark.slow)
        if not is_fast and not whole:
            more = kept.union(covering(rows, strength + 1))
            left_out.update(id(item) for index, item in enumerate(grid) if index not in more)
    items[:] = [item for item in items if id(item) not in left_out]
