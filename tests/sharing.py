"""Results that test processes share: expensive ones are made once, not once per process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from filelock import FileLock

T = TypeVar("T")


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]
) -> tuple[Path, T]:
    """Return a folder of that name and what `make(folder)` returned for it, in one process.

    The others wait for it. No caller may change the folder.
    """
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, result = root / name, root / f"{name}.pt"
    with FileLock(root / f"{name}.lock"):
        if not result.exists():
            folder.mkdir()
            torch.save(make(folder), result)
    return folder, torch.load(result, weights_only=False)
