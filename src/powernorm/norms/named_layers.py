"""Users' layers by name: `module:Class`, and short names from installed packages."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from powernorm.errors import InputError

GROUP: Final = "powernorm.norms"
"""Group of packages' entry points: `mine = "my.module:MyNorm"` makes `mine` a short name."""


def imported_layer(name: str) -> Any:
    """Return the layer that `module:attribute` names; see `imported`."""
    return imported(name, "norm ", "my.module:MyNorm")


def imported(name: str, kind: str = "", example: str = "my.module:train") -> Any:
    """Return the object that `module:attribute` names; importing the module runs its code.

    The module is searched as by `python -m`, in the working directory first (unless Python runs
    with `-P`).

    Args:
        name: of the object.
        kind: what it is to be, for the errors, with a space behind it.
        example: of such a name.

    Raises:
        InputError: not of that form, no such module, one that fails, or no such attribute.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and all(map(str.isidentifier, [*module.split("."), *attribute.split(".")]))):
        raise InputError(f"{kind}{name!r} is not of the form {example}")
    if module.endswith(".py"):
        expected = f"{module.removesuffix('.py')}:{attribute}"
        raise InputError(f"{kind}{name!r} names a file: name its module, {expected}")
    try:
        return import_attribute(module, attribute)
    except Exception as error:  # a user's module may raise anything
        advice = ""
        if isinstance(error, ModuleNotFoundError):
            advice = ": start in the folder that holds it, or put that on PYTHONPATH"
        raise InputError(
            f"{kind}{name!r} cannot be loaded ({type(error).__name__}: {error}){advice}"
        ) from error


def import_attribute(module_name: str, attribute: str) -> Any:
    """Return what a module holds under a dotted name; running its code may raise anything.

    The module is also looked for in the working directory, as by `python -m`.
    """
    if not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


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
            f"norm {name!r} is of several packages ({', '.join(owners)}): name one of "
            f"{' and '.join(sorted({point.value for point in points}))}"
        )
    try:
        return points[0].load()
    except Exception as error:  # the package may raise anything
        raise InputError(
            f"norm {name!r} of the package {owners[0]} cannot be loaded ({type(error).__name__}: "
            f"{error})"
        ) from error
