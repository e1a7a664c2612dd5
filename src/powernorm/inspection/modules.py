"""The modules of a model by name, and the layers with batch statistics among them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, TypeVar

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.arguments import check_model

_COMPILED: Final = "_orig_mod"
"""Name under which `torch.compile` keeps the wrapped module."""
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_LEVELS: Final = 2
"""Levels of lists, tuples and dicts in which modules are searched."""


def name_without_compile(name: str) -> str:
    """Return a module's dotted name without the parts added by `torch.compile`."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules, each once, by their names without `torch.compile`.

    For a compiled wrapper the inner module is returned, which is the one that hooks see.
    """
    return {name_without_compile(name): module for name, module in model.named_modules()}


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled, by `torch.compile` or in place."""
    return any(
        _COMPILED in module._modules or module._compiled_call_impl is not None
        for module in model.modules()
    )


def check_not_compiled(model: nn.Module, purpose: str) -> None:
    """Raise an InputError if hooks would be silently ignored.

    Raises:
        InputError: the model is compiled.
    """
    if is_compiled(model):
        raise InputError(
            f"{type(model).__name__} is compiled already, and compiled code ignores hooks that "
            f"are added later: attach {purpose} to the model before torch.compile"
        )


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the module's forward by name."""
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward in C++
        return {}


def batch_layers(model: nn.Module) -> dict[str, BatchStatisticsNorm]:
    """Return the layers with batch statistics by name, in the order of the model, each once.

    They are among the norms that `find_norms` finds.
    """
    return {
        name: module
        for name, module in modules_by_name(model).items()
        if isinstance(module, BatchStatisticsNorm)
    }


def torch_batch_norms(model: nn.Module) -> str:
    """Return a sentence that names the BatchNorms of torch in a model, "" if there are none."""
    found = [
        name
        for name, module in modules_by_name(model).items()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if not found:
        return ""
    return (
        f"; {listed(found, 2)} of torch become such by powernorm.mask_batch_norms or "
        'powernorm.swap(model, "bn", where=...)'
    )


Names = str | Iterable[str]
"""A glob over module names, or several: `"encoder.*"`, `["*.norm1", "final_norm"]`."""


def choose_layers(
    model: nn.Module, names: Names | None, purpose: str
) -> dict[str, BatchStatisticsNorm]:
    """Return the layers with batch statistics that match a glob, by name, in the model's order.

    Args:
        model: any module.
        names: globs over the names of modules; None means all layers.
        purpose: purpose of the layers, for the messages ("to calibrate").

    Raises:
        InputError: no model, no globs, a model without such a layer, or a glob that matches none.
    """
    check_model(model)
    return choose_among(model, batch_layers(model), names, f"layer with batch statistics {purpose}")


_Layer = TypeVar("_Layer", bound=nn.Module)


def choose_among(
    model: nn.Module, layers: dict[str, _Layer], names: Names | None, wanted: str
) -> dict[str, _Layer]:
    """Return the layers that match a glob, by name, in their order.

    Args:
        model: that has the layers.
        layers: by name.
        names: globs over the names; None means all layers.
        wanted: what the layers are and what they are needed for, for the messages.

    Raises:
        InputError: no globs, no layers, or a glob that matches none.
    """
    given: object = names
    if names is not None and (not isinstance(given, Iterable) or isinstance(given, bytes)):
        raise InputError(f"names is {names!r}, expected a glob over module names, or several")
    globs = [names] if isinstance(names, str) else list(names or ())
    for glob in globs:
        if not isinstance(glob, str):
            raise InputError(f"names has {glob!r}, expected globs over module names")
    if names is not None and not globs:
        raise InputError(f"names is empty, which leaves no {wanted}: give a glob, or None")
    if not layers:
        raise InputError(
            f"{type(model).__name__} has no {wanted}: put some in "
            f"first, for example with powernorm.swap{torch_batch_norms(model)}"
        )
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in layers):
            raise InputError(
                f"names has {glob!r}, which matches no {wanted}; the model has {listed(layers)}"
            )
    chosen = {name for name in layers for glob in globs or ["*"] if fnmatchcase(name, glob)}
    return {name: layer for name, layer in layers.items() if name in chosen}


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return the names as text for a message; beyond `most` only their number is given."""
    every = list(names)
    text = ", ".join(repr(name) for name in every[:most])
    return text if len(every) <= most else f"{text} and {len(every) - most} more"


class ReplacedForward:
    """A forward that runs in front of a module's own, with its signature.

    Subclasses define `__call__`.

    Args:
        module: module that gets it as an attribute.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._replaced = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def call_replaced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's own forward."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def remove(self) -> None:
        """Restore the module's own forward, unless another one is in front now."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self._replaced is not None:
                self.module.__dict__["forward"] = self._replaced

    @property
    def __code__(self) -> CodeType:  # torch.export looks for it
        return type(self).__call__.__code__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._replaced or type(self.module).forward.__get__(self.module))


def held_outside(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that plain attributes of modules refer to, with a reason to keep each.

    Covered are attributes themselves, lists, tuples and dicts to two levels, and functions that
    close over a module or are a method of one. A forward may call the module through these, even
    after another one has taken its place among the modules.
    """
    found: dict[nn.Module, str] = {}
    for parent in model.modules():
        if isinstance(parent, torch.jit.ScriptModule):
            continue
        for attribute, value in (*vars(parent).items(), ("forward", type(parent).forward)):
            if attribute in _OF_MODULES:
                continue
            for one in _modules_in(value, _LEVELS):
                if one is not parent:
                    found.setdefault(
                        one,
                        f"{type(parent).__name__} also holds it in the plain {attribute}, through "
                        "which its forward may call it: make that a torch.nn.Module attribute or a "
                        "torch.nn.ModuleList",
                    )
    return found


def _modules_in(value: object, levels: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif levels and isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(one, levels - 1)
    elif isinstance(value, MethodType):
        yield from _modules_in(value.__self__, 0)
    elif levels and isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield from _modules_in(cell.cell_contents, levels - 1)
