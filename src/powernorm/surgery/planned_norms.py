"""Check that planned norms run, and masks reach them: warnings name those of which this fails.

A forward may read a norm's parameters, or call the old module, which a tuple or a closure holds.
The first backward shows this: parameters got a gradient although their norm was not called, or
the old module was called. So do ten training forwards of the module around a norm without a call
of the norm. If that module was not called either, nothing is known, as only a part of the model may
be trained.

The hooks are bound methods of a plain object, like those of mask owners, and are copied and pickled
with the model. They do nothing in compiled code, and are removed when all norms have been called.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.errors import InputError
from powernorm.inspection.mask_checks import MaskWarning
from powernorm.inspection.modules import is_compiled
from powernorm.norms import Norm
from powernorm.norms.masks import current_padding_mask, innermost_scope
from powernorm.ops.torch_private import assume_constant, in_backward
from powernorm.surgery.changes import modules_around
from powernorm.surgery.optimizers import NewNorm

_FORWARDS: Final = 10
"""Number of training forwards after which a norm should have been called, with a mask."""
_SHOWN: Final = 5
_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose submodules are often called without them."""


class PlannedNorms:
    """Hooks that record which new norms are called, until all were or ten forwards have passed.

    Args:
        model: the model that was changed.
        new: the new norms.
        verb: `swap` or `insert`, for messages.
    """

    def __init__(self, model: nn.Module, new: Sequence[NewNorm], verb: str) -> None:
        self.model = model
        self.verb = verb
        self.key = f"{next(_number)}"  # a string, which is a constant in compiled code
        self.waiting = {one.norm: one.names[0] for one in new}
        self.counts = {norm: _count(norm) for norm in self.waiting}
        modules = dict(model.named_modules(remove_duplicate=False))
        paths = {one.names[0]: [_around(modules, place) for place in one.places] for one in new}
        # If the map's forward is called by name, neither the map's hook nor the norm runs.
        self.unseen = {
            name
            for name, around in paths.items()
            if any(_calls_unseen(type(one), verb == "swap") for path in around for one in path)
        }
        self.around = {name: [path[-1] for path in around] for name, around in paths.items()}
        self.forwards: Counter[nn.Module] = Counter()
        self.used: set[str] = set()  # got a gradient, or were called as they were before
        self.handles: list[RemovableHandle] = []
        for norm in self.waiting:
            self.handles.append(norm.register_forward_pre_hook(self.called))
        for module in {model, *(one for around in self.around.values() for one in around)}:
            self.handles.append(module.register_forward_hook(self.left))
        self._on_parameters = self._watch_gradients()

    def called(self, module: nn.Module, _args: Any) -> None:
        """Record that a norm was called; runs before its forward."""
        if torch.compiler.is_compiling():
            _note_tracing(self.key)
            return
        if not self.waiting:
            return
        # An old norm and its successor share their tables of hooks, and so do copies of a model
        # for several devices.
        shared = [
            one for one in self.waiting if one._forward_pre_hooks is module._forward_pre_hooks
        ]
        for norm in shared:
            if type(module) is type(norm):
                del self.waiting[norm]
            else:
                self.used.add(self.waiting[norm])
        if not self.waiting:
            self._end()

    def left(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Count a training forward of a module around norms; runs after it."""
        is_training = module.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not (self.waiting and is_training):
            return
        with suppress(InputError):  # if torch does not report it
            if in_backward():
                return
        self.forwards[module] += 1
        names = self._missing(self.used - self.unseen) if self.forwards[module] > 1 else []
        if names:
            self._warn(names, "not called, although the model computes with what they replace")
            self.waiting = {norm: name for norm, name in self.waiting.items() if name not in names}
            if not self.waiting:
                self._end()
        # The outermost module has seen all calls.
        if self.forwards[module] >= _FORWARDS + (module is not self.model):
            names = [
                name
                for name in self._missing(self.waiting.values())
                if max(self.forwards[one] for one in self.around[name]) >= _FORWARDS
            ]
            self._warn(names, f"not called in {_FORWARDS} training forwards")
            self._end()

    def _end(self) -> None:
        """Stop watching; compiled code that has traced the hooks would be recompiled."""
        self.waiting.clear()
        if self.key not in _traced:
            self.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        self.waiting.clear()
        for handle in (*self.handles, *self._on_parameters):
            handle.remove()
        self.handles, self._on_parameters = [], []

    def _watch_gradients(self) -> list[RemovableHandle]:
        """Record which norms' own parameters get a gradient."""
        got = self.used
        modules = self.model.modules()
        held = Counter(id(p) for one in modules for p in one.parameters(recurse=False))
        return [
            # Through the set only, so that a parameter does not keep its model alive.
            p.register_post_accumulate_grad_hook(lambda _, name=name: got.add(name))
            for norm, name in self.waiting.items()
            for p in norm.parameters()
            if p.requires_grad and p.is_leaf and held[id(p)] == 1
        ]

    def _missing(self, names: Collection[str]) -> list[str]:
        """Return which of these are in place and, as far as is known, were not called."""
        current = dict(self.model.named_modules(remove_duplicate=False)) if names else {}
        return [
            name
            for norm, name in self.waiting.items()
            if name in names
            and current.get(name) is norm
            and not is_compiled(norm)
            and (name not in self.unseen or self.counts[norm] is not None)
            and _count(norm) == self.counts[norm]
        ]

    def _warn(self, names: Sequence[str], what: str) -> None:
        if not names:
            return
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warnings.warn(
            f"norms that {self.verb} has added were {what}: {', '.join(names[:_SHOWN])}{more}. The "
            "forward around them reads their parameters itself, or calls another object (held in "
            "a tuple, a list or a closure): let it call the module by its attribute, or leave "
            "these out by where=",
            stacklevel=3,
        )

    def __getstate__(self) -> dict[str, Any]:
        # Parameters of copies have no hooks.
        return {**self.__dict__, "_on_parameters": []}


class MaskWatch:
    """Hooks that warn of norms which no mask reaches, although they were to leave out padding.

    They count the training calls of each norm with several positions, and are removed when a mask
    arrives or ten calls of one norm had none.

    Args:
        norms: the norms by their dotted names.
        planned: argument of a module that should give the mask; a call of that module without a
            mask is no reason to warn. None if there is none.
    """

    def __init__(self, norms: Mapping[str, Norm], planned: str | None = None) -> None:
        self.planned = planned
        self.names = dict(zip(norms.values(), norms, strict=True))
        self.calls: Counter[nn.Module] = Counter()
        self.handles = [
            norm.register_forward_pre_hook(self.called, with_kwargs=True) for norm in self.names
        ]

    def called(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call; runs before the norm's forward."""
        is_training = norm.training and torch.is_grad_enabled()  # not measured alone
        if torch.compiler.is_compiling() or not is_training:
            return
        masks = (*args[1:2], kwargs.get("padding_mask"), current_padding_mask())
        is_inside = self.planned is not None and innermost_scope(observing=True) is not None
        if is_inside or any(mask is not None for mask in masks):
            self.remove()
        elif args and isinstance(args[0], Tensor) and args[0].ndim > 2 and not args[0].is_nested:
            self.calls[norm] += 1
            if self.calls[norm] == _FORWARDS:
                self.remove()
                names = list(self.names.values())
                shown = f"norms {', '.join(names[:3])}{', …' * (len(names) > 3)}"
                counts = "padding, if there is any, counts in their statistics"
                how = "call the model inside `with powernorm.padding_mask(mask):`"
                warnings.warn(
                    f"in {_FORWARDS} training calls since mask_batch_norms no padding mask has "
                    f"reached its {shown}: {counts}. Give the model its mask, declare "
                    f"the argument that is one (powernorm.declare_mask) before mask_batch_norms, "
                    f"or {how}"
                    if self.planned is None
                    else f"in {_FORWARDS} training calls the {shown} ran outside of the module "
                    f"that passes them the mask {self.planned}: {counts}. Call that module itself, "
                    f"not its parts or its forward, or {how}",
                    MaskWarning,
                    stacklevel=2,
                )

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def end_watches(model: nn.Module) -> None:
    """Remove the hooks that watch whether norms run, after norms have left the model."""
    for module in list(model.modules()):
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            watch = getattr(hook, "__self__", None)
            if isinstance(watch, PlannedNorms):
                watch.remove()


_number: Final = itertools.count()
_traced: Final[set[str]] = set()
"""Keys of objects whose hooks were traced in this process."""


@assume_constant
def _note_tracing(key: str) -> bool:
    _traced.add(key)
    return True


def _count(norm: Norm) -> int | None:
    """Return the number of batches that a norm has seen; None if it does not count."""
    count = getattr(norm, "num_batches_tracked", None)
    return None if not isinstance(count, Tensor) or count.is_meta else int(count)


def _around(modules: Mapping[str, nn.Module], name: str) -> list[nn.Module]:
    """Return the modules around a norm, starting with the model; the last is no container."""
    path = modules_around(modules, name)
    while len(path) > 1 and isinstance(path[-1], _CONTAINERS):
        path.pop()
    return path


def _calls_unseen(cls: type, by_forward: bool) -> bool:
    """Return whether a class may call modules without their hooks: by `forward`, or compiled."""
    if cls.__module__.startswith("torch."):
        return False
    functions = [value for value in vars(cls).values() if callable(value)]
    if any(hasattr(one, "_torchdynamo_orig_callable") for one in functions):
        return True
    codes = [getattr(one, "__code__", None) for one in functions]
    return by_forward and any(_names_forward(code) for code in codes if code is not None)


def _names_forward(code: CodeType) -> bool:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return "forward" in code.co_names or any(map(_names_forward, inner))
