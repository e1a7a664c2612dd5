"""A torch without a private name: a norm's result is right, or an error says why there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from norms.missing_names import ALL, names

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("missing_names.py")
NEEDS_NONE = ("plain", "evaluated", "batched")
"""Scenarios that need no private name."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=True)
    printed: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return printed


@pytest.mark.parametrize("missing", [*names(), ALL])
def test_a_missing_name(found: dict[str, dict[str, Any]], missing: str) -> None:
    for what, expected in found[""].items():
        result = found[missing][what]
        if isinstance(result, str) and what.rpartition(": ")[2] not in NEEDS_NONE:
            continue
        assert type(result) is type(expected), f"{what}: {result}"
        if isinstance(result, str):
            assert result == expected, what
            continue
        for value, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(value), torch.tensor(wanted), rtol=1e-5, atol=1e-6, msg=what
            )


def test_with_all_names(found: dict[str, dict[str, Any]]) -> None:
    """Then errors are for what is not supported."""
    errors = {what for what, result in found[""].items() if isinstance(result, str)}
    refused = ("reentrant", "transformed", "forward mode")
    batch = ("bn", "rbn", "pn", "mabn")
    assert errors == {f"{norm}: {what}" for norm in batch for what in refused}
