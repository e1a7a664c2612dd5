"""Users' layers by name: `module:Class`, and short names from installed packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final

from torch import nn

from powernorm.errors import InputError

GROUP: Final = "powernorm.norms"
"""Group of packages' entry points: `mine = "my.module:MyNorm"` makes `mine` a short name."""


_OF_A_FILE: Final = ContextVar("of_a_file", default=False)
_TRUSTED: Final = ContextVar("trusted", default=False)


@contextmanager
def names_of_files() -> Iterator[None]:
    """Treat names in the block as read from an untrusted file: they import nothing.

    Only classes of modules that this process has loaded are accepted; after `trust_code` any
    object.
    """
    before = _OF_A_FILE.set(True)
    try:
        yield
    finally:
        _OF_A_FILE.reset(before)


def trust_code(is_trusted: bool) -> None:
    """Set whether names in files import their modules, though not from the working directory."""
    _TRUSTED.set(is_trusted)


def imported_layer(name: str) -> Any:
    """Return the layer that `module:attribute` names; see `imported`."""
    return imported(name, "norm ", "my.module:MyNorm", nn.Module)


def imported(
    name: str, kind: str = "", example: str = "my.module:train", base: type = object
) -> Any:
    """Return the object that `module:attribute` names; importing the module runs its code.

    The module is searched as by `python -m`, in the working directory first (unless Python runs
    with `-P`). Inside `names_of_files` nothing is imported.

    Args:
        name: name of the object.
        kind: kind of the object, for errors, with a trailing space.
        example: an example of such a name.
        base: required base class of a class named by a file.

    Raises:
        InputError: not of that form, no such module, one that fails, or no such attribute.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and all(map(str.isidentifier, [*module.split("."), *attribute.split(".")]))):
        raise InputError(f"{kind}{name!r} is not of the form {example}")
    if module.endswith(".py"):
        expected = f"{module.removesuffix('.py')}:{attribute}"
        raise InputError(f"{kind}{name!r} names a file: name its module, {expected}")
    of_a_file = _OF_A_FILE.get()
    if of_a_file and not _TRUSTED.get():
        return loaded_class(name, base, kind)
    try:
        return _attribute_of(module, attribute, also_here=not of_a_file)
    except Exception as error:  # a user's module may raise anything
        advice = ""
        if isinstance(error, ModuleNotFoundError):
            here = "" if of_a_file else "start in the folder that holds it, or "
            advice = f": {here}put {'its folder' if of_a_file else 'that'} on PYTHONPATH"
        raise InputError(
            f"{kind}{name!r} cannot be loaded ({type(error).__name__}: {error}){advice}"
        ) from error


def _attribute_of(module_name: str, attribute: str, *, also_here: bool) -> Any:
    """Return a module's object with a dotted name; running the module's code may raise anything."""
    if also_here and not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def loaded_class(name: str, base: type = nn.Module, kind: str = "norm ") -> type:
    """Return the class of `module:Class` without importing or calling anything.

    A name in an untrusted file must not be that of a function, or of an object that its module
    imported from elsewhere.

    Args:
        name: name of the class.
        base: required base class.
        kind: kind of the object, for the error, with a trailing space.

    Raises:
        InputError: no module that this process has loaded defines such a class.
    """
    module, _, attribute = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in attribute.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    if isinstance(found, type) and issubclass(found, base) and found.__module__ == module:
        return found
    raise InputError(
        f"{kind}{name!r} is named by a file and is not a class of a module that this process has "
        f"loaded: `import {module}` first, if you trust it, or give the command --trust-code"
    )


def packaged_names() -> list[str]:
    """Return the short names that installed packages define."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=GROUP)})


def packaged_layer(name: str) -> Any | None:
    """Return the layer that an installed package defines for a short name, or None.

    Raises:
        InputError: several packages define it, or the layer cannot be loaded.
    """
    # Imported here, because known names need no search of the installed packages.
    from importlib.metadata import entry_points

    points = [*entry_points(group=GROUP, name=name)]
    if not points:
        return None
    owners = sorted({point.dist.name if point.dist is not None else "?" for point in points})
    if len({point.value for point in points}) > 1:
        raise InputError(
            f"norm {name!r} is defined by several packages ({', '.join(owners)}): name one of "
            f"{' and '.join(sorted({point.value for point in points}))}"
        )
    try:
        return points[0].load()
    except Exception as error:  # the package may raise anything
        raise InputError(
            f"norm {name!r} of the package {owners[0]} cannot be loaded ({type(error).__name__}: "
            f"{error})"
        ) from error
