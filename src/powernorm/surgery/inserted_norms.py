"""Norms that stand behind linear maps of a model: a child of the map, which a hook calls.

The map stays where it is and what it is, so that the names of its own weights stay, too.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn

from powernorm.surgery.changes import Changes

CHILD: Final = "inserted_norm"
"""Attribute of a map that holds the norm behind it."""


def put_behind(linear: nn.Module, norm: nn.Module, changes: Changes) -> None:
    """Put a norm behind a linear map.

    Args:
        linear: changed in place.
        norm: of its outputs.
        changes: takes down how it is undone.
    """
    changes.set_module(linear, CHILD, norm)
    changes.on_undo(linear.register_forward_hook(_normalize).remove)


def has_one_behind(linear: nn.Module) -> bool:
    """Return whether a norm was put behind a module."""
    return _normalize in linear._forward_hooks.values()


def maps_with_one_behind(model: nn.Module) -> tuple[str, ...]:
    """Return the dotted names of the linear maps that have a norm behind them."""
    return tuple(name for name, module in model.named_modules() if has_one_behind(module))


def _normalize(linear: nn.Module, args: Any, output: Tensor) -> Tensor:
    # The attribute is read anew: a swap or a fold may have put another module there. A function of
    # the module that is called, not a method of an object, is right in copies of the model.
    del args
    normalized: Tensor = linear._modules[CHILD](output)  # type: ignore[misc]
    return normalized
