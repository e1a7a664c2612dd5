"""Triton's programs compile for GPUs of several makers and ages, within what each of them has."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEVICES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
OPS = ("batch", "power", "static", "token")
TYPES = ("float32", "bfloat16", "float16", "float64")
WIDTHS = (64, 513, 768, 1024, 4096, 4097, 5120, 8192, 16384)
GROUPS = {513: 3, 768: 12, 4097: 17}
"""Besides none and a single one; 8 where nothing is said."""

# What overran shared memory or threads when plans were made for an H100, then one of each.
DEFAULT = (
    ("sm_86", "batch", "float32", 4097, 1, True, False),
    ("sm_120", "power", "float32", 5120, 1, True, False),
    ("sm_80", "static", "bfloat16", 16384, 1, True, False),
    ("gfx942", "token", "bfloat16", 16384, 1, False, False),
    ("sm_75", "token", "bfloat16", 8192, 1, False, True),
    ("sm_90", "batch", "float64", 768, 12, True, True),
    ("sm_90", "power", "bfloat16", 1024, 1, False, False),
    ("sm_89", "power", "float16", 513, 3, True, True),
    ("sm_100", "static", "float32", 1024, 0, False, True),
    ("gfx942", "update", "float32", 1024, 0, False, True),
    ("sm_90", "update", "float64", 4096, 0, False, False),
)


def compiled(rows: Any, cache: Path) -> list[dict[str, Any]]:
    """Compile in a process of its own, without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-W", "error", str(Path(__file__).with_name("compile_programs.py"))
    ]  # fmt: skip
    result = subprocess.run(
        command,
        input=json.dumps(rows),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def check_fit(programs: list[dict[str, Any]]) -> None:
    for program in programs:
        assert program["shared"] <= program["shared_limit"], program
        assert program["threads"] <= program["most_threads"], program
        # A thread has 128 registers and more for such rows: hardly any value leaves them.
        if program["width"] <= 4096 and program["dtype"] != "float64":
            assert program["spilled"] <= 256, program


@pytest.mark.slow
def test_programs_fit(tmp_path: Path) -> None:
    programs = compiled(DEFAULT, tmp_path)
    assert len({program["kernel"] for program in programs}) == 17
    check_fit(programs)


def rows_for(device: str) -> list[tuple[Any, ...]]:
    """Every op at a third of the widths, the next third for the next device; the updates."""
    rows = []
    number = DEVICES.index(device)
    for op in OPS:
        for index, width in [*enumerate(WIDTHS)][number % 3 :: 3]:
            draw = random.Random(f"{device} {op} {width}")
            dtype = TYPES[(index + number) % len(TYPES)]
            groups = draw.choice((1, 1, GROUPS.get(width, 8), *[0] * (op != "token")))
            rows.append(
                (device, op, dtype, width, groups, draw.random() < 0.6, draw.random() < 0.5)
            )
    rows += [(device, "update", dtype, 4096, 0, False, True) for dtype in ("float32", "float64")]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_programs_fit_everywhere(device: str, tmp_path: Path) -> None:
    programs = compiled(rows_for(device), tmp_path)
    check_fit(programs)
