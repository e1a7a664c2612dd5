"""The examples in the docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from importlib.util import find_spec

import pytest
import torch

import powernorm

PACKAGES = [
    powernorm,
    *([importlib.import_module("powernorm_lab")] if find_spec("powernorm_lab") else []),
]
MODULES = sorted(
    info.name
    for package in PACKAGES
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    names = {"torch": torch, "powernorm": powernorm}
    assert doctest.testmod(module, extraglobs=names).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(bool(test.examples) for m in modules for test in finder.find(m)) >= 14
