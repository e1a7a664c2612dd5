"""Results that test processes share: what is expensive is made once, not once a process."""

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

    The others wait for it. Whoever gets the folder may not change it.
    """
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, result = root / name, root / f"{name}.pt"
    with FileLock(root / f"{name}.lock"):
        if not result.exists():
            folder.mkdir()
            torch.save(make(folder), result)
    return folder, torch.load(result, weights_only=False)
