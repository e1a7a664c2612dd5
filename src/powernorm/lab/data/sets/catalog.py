"""All data sets by name."""

import difflib
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pydantic import ConfigDict, TypeAdapter

from powernorm.errors import InputError
from powernorm.lab.data.sets.entries import DataSet


def _read() -> dict[str, DataSet]:
    # Not by __file__: the package may lie in a zip.
    table = files("powernorm.lab.data.sets") / "data_sets.toml"
    facts = tomllib.loads(table.read_text(encoding="utf-8"))
    strict = TypeAdapter(dict[str, DataSet], config=ConfigDict(extra="forbid"))
    return strict.validate_python({name: {"name": name, **keys} for name, keys in facts.items()})


SETS: Final[Mapping[str, DataSet]] = MappingProxyType(_read())
"""Embedded ones first, then those that can be fetched, then those that the user brings."""


def data_set(name: str) -> DataSet:
    """Return the entry of a data set.

    Raises:
        InputError: there is none of that name; names the nearest and all.
    """
    if name in SETS:
        return SETS[name]
    near = difflib.get_close_matches(name.lower(), SETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"there is no data set {name!r}: {hint}The known ones are {', '.join(SETS)}")


def check_known_set(name: str, task: str) -> None:
    """Check that a task's reader can find the data where they bear the name of a known set.

    Raises:
        InputError: no file is there, and the set is of another task or one that the user must
            bring.
    """
    entry = SETS.get(name)
    if entry is None or Path(name).exists():
        return
    if task not in entry.tasks:
        names = [other.name for other in SETS.values() if task in other.tasks]
        raise InputError(
            f"{name} is a data set of {', '.join(entry.tasks)}, not of {task}: take one of "
            f"{', '.join(names)}, or files of your own (see `powernorm data`)"
        )
    if entry.home == "own":
        raise InputError(
            f"{name} does not exist: a data set that powernorm neither holds nor fetches; it "
            f"comes from {entry.source} and is then given as {entry.usage}"
        )
