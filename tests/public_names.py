"""Public names as text, for snapshots."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any


def public_names(package: str) -> str:
    """A line for each name of `__all__`, and for each public member that a class defines."""
    module = importlib.import_module(package)
    lines = [line for name in module.__all__ for line in described(name, getattr(module, name))]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))


def described(name: str, value: Any) -> Iterator[str]:
    """The line of a name, and of each public member that a class defines."""
    if inspect.isclass(value) and not issubclass(value, BaseException):
        yield f"class {name}{signature(value)}"
        for member, entry in sorted(inspect.getmembers(value)):
            owner = next((base for base in value.__mro__ if member in vars(base)), object)
            if not member.startswith("_") and owner.__module__.startswith("powernorm"):
                yield f"    {member}{signature(entry)}"
    else:
        yield f"{name}{signature(value)}"


def signature(value: Any) -> str:
    """Its parameters, empty where it has none of its own, as an exception."""
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
