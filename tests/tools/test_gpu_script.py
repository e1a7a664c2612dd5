"""`tools/gpu.sh` where there is torch, triton, numpy, pytest, hypothesis and nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "numpy", "pytest", "hypothesis")
pytest.importorskip("triton")


def with_needs(names: tuple[str, ...]) -> set[str]:
    """Names of distributions with all that they need, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another system or Python
        found.add(name)
        waiting += [re.split(r"[^\w.-]", need)[0] for need in needs if "extra ==" not in need]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that sees these packages alone."""
    folder = tmp_path_factory.mktemp("alone")
    site = folder / "site"
    site.mkdir()
    for name in with_needs(PACKAGES):
        for file in importlib.metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith(".pth"):
                link = site / top
                if not link.exists():
                    link.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    launcher = folder / "python"
    launcher.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec {sys.executable} -S "$@"\n',
        encoding="utf-8",
    )
    launcher.chmod(0o755)
    return launcher


def run(python: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHON": str(python), "PYTHONPATH": "src"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_tests_of_a_gpu_need_nothing_else(python: Path) -> None:
    done = run(python, str(python), "-c", "import typer")
    assert "No module named 'typer'" in done.stderr
    done = run(
        python, str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu",
        "-m", "not gpu and not slow",
        "-k", "float64_gives and (pnv or adanorm) or checkpointed and rms",
        TRITON_INTERPRET="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.slow
def test_the_whole_script_at_small_sizes(python: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu"
    done = run(python, "tools/gpu.sh", str(out), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("parity", "training", "norms", "steps"):
        rows = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) > 5, name
    assert all("no GPU" in line for line in done.stdout.splitlines()[:1])


def test_without_a_gpu_the_figures_are_refused(python: Path) -> None:
    done = run(python, str(python), "benchmarks/gpu.py", "norms", TRITON_INTERPRET="")
    assert done.returncode == 1
    assert "torch sees no GPU" in done.stderr
