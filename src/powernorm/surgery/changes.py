"""Changes of a model's modules that can be undone.

A norm that is inserted behind a linear map is a child of the map, called by a hook. The map stays
in its place with its class, so the names of its own weights stay, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError

_MISSING: Any = object()

HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Tables of hooks that a successor shares with the old norm."""
_ALL_HOOKS: Final = (
    *HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)

CHILD: Final = "inserted_norm"
"""Attribute of a linear map that holds the norm behind it."""


class Changes:
    """Record of set modules, parameters and attributes that can restore the former objects."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._done = False

    def set_module(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Set a child module of a parent."""
        self._set(parent._modules, name, module)

    def set_tensor(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Set a parameter or a buffer of a module."""
        slots: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
        self._set(slots, name, tensor)

    def set_attribute(self, target: object, name: str, value: object) -> None:
        """Set an attribute of an object."""
        before = getattr(target, name)
        self._undo.append(lambda: setattr(target, name, before))
        setattr(target, name, value)

    def set_entry(self, module: nn.Module, name: str, value: object) -> None:
        """Set an attribute of a module instance, in front of one of its class."""
        self._set(module.__dict__, name, value)

    def leave_fast_path(self, model: nn.Module, norms: Iterable[nn.Module]) -> None:
        """Switch off torch's fused Transformer layers where they would bypass one of the norms.

        In evaluation without gradients `nn.TransformerEncoderLayer` computes LayerNorm with the
        weights of the modules in `norm1` and `norm2`, whatever they are, and
        `nn.TransformerEncoder` passes its layers a nested tensor and no mask. The attributes that
        are set here are copied with the model.
        """
        wanted = {id(norm) for norm in norms}
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                attribute, off = "activation_relu_or_gelu", 0
            elif isinstance(module, nn.TransformerEncoder):
                attribute, off = "use_nested_tensor", False
            else:
                continue
            uses_path = getattr(module, attribute, off) != off
            if uses_path and any(id(part) in wanted for part in module.modules()):
                self.set_attribute(module, attribute, off)

    def on_undo(self, step: Callable[[], None]) -> None:
        """Register a function to be called on undo."""
        self._undo.append(step)

    @property
    def is_undone(self) -> bool:
        """Whether everything was undone."""
        return self._done

    def check_not_undone(self) -> None:
        """Raise an InputError if everything was undone already."""
        if self._done:
            raise InputError("undo was called already: there is nothing left to restore")

    def undo(self) -> None:
        """Undo all changes, last change first.

        Raises:
            InputError: everything was undone already.
        """
        self.check_not_undone()
        self._done = True
        for step in reversed(self._undo):
            step()
        self._undo.clear()

    def _set(self, slots: dict[str, Any], name: str, value: object) -> None:
        before = slots.get(name, _MISSING)

        def put_back() -> None:
            if before is _MISSING:
                slots.pop(name, None)
            else:
                slots[name] = before

        self._undo.append(put_back)
        slots[name] = value


def put_behind(linear: nn.Module, norm: nn.Module, changes: Changes) -> None:
    """Put a norm behind a linear map.

    Args:
        linear: changed in place.
        norm: norm of its outputs.
        changes: record of the change, for undo.
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
    # The attribute is read at each call, as a swap or a fold may have replaced the module. A
    # function of the called module, not a method of an object, is right in copies of the model.
    del args
    normalized: Tensor = linear._modules[CHILD](output)  # type: ignore[misc]
    return normalized


def parameter_like(value: Tensor, old: Tensor) -> Tensor:
    """Return a value as a parameter or buffer with the kind, type and device of the old one."""
    new = value.to(old.device, old.dtype)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, each name of a shared one."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def slot_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the parent module and the attribute of a dotted name."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def modules_around(modules: Mapping[str, nn.Module], name: str) -> list[nn.Module]:
    """Return the modules around a dotted name, starting with the model."""
    parts = name.split(".")
    return [modules[".".join(parts[:length])] for length in range(len(parts))]


def empty_bias(size: int, like: Tensor) -> nn.Parameter:
    """Return a bias of zeros that fits a weight."""
    zeros = torch.zeros(size, device=like.device, dtype=like.dtype)
    return nn.Parameter(zeros, like.requires_grad)


def share_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let two modules share their tables of hooks, so that handles remove hooks from both."""
    for name in (*_ALL_HOOKS, "_is_full_backward_hook"):
        new.__dict__[name] = old.__dict__[name]


def hook_ids(module: nn.Module) -> dict[str, frozenset[int]]:
    """Return the numbers of a module's hooks, for `drop_later_hooks`."""
    return {name: frozenset(module.__dict__[name]) for name in _ALL_HOOKS}


def drop_later_hooks(module: nn.Module, before: Mapping[str, frozenset[int]]) -> None:
    """Remove the hooks that were added after `hook_ids`."""
    for name, ids in before.items():
        hooks = module.__dict__[name]
        for key in [key for key in hooks if key not in ids]:
            del hooks[key]
