"""The examples in the docstrings."""

from __future__ import annotations

import doctest
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import powernorm

FOLDERS = [
    Path(place)
    for package in ("powernorm", "powernorm_lab")
    if (spec := find_spec(package)) is not None
    for place in spec.submodule_search_locations or ()
]
MODULES = sorted(
    ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
    for folder in FOLDERS
    for file in folder.rglob("*.py")
    # Looking for examples in all modules takes ten times as long.
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    names = {"torch": torch, "powernorm": powernorm}
    assert doctest.testmod(importlib.import_module(name), extraglobs=names).failed == 0


def test_there_are_examples() -> None:
    assert len(MODULES) >= 14
