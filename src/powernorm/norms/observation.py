"""Running a model, finding its layers with batch statistics, seeing what goes into them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.errors import InputError
from powernorm.norms.base import BatchStatisticsNorm
from powernorm.norms.contract import Norm
from powernorm.norms.feature_dims import features_last
from powernorm.norms.registry import NORMS, REGISTERED
from powernorm.ops.moments import Moments
from powernorm.ops.reference.batch import in_backward

Forward = Callable[[nn.Module, Any], object]
"""Runs a model on one batch; what it returns is not used."""

_COMPILED = "_orig_mod"
"""Name under which `torch.compile` keeps the module that it wraps."""


def call_model(model: nn.Module, batch: Any) -> object:
    """`model(**batch)` for a mapping, `model(*batch)` for a tuple or list, else `model(batch)`."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def check_model(model: object, name: str = "model") -> None:
    """Raises unless this is a module; `name` is that of the argument."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} is {_shown(model)}, expected a torch.nn.Module: give the model itself"
        )


def check_function(name: str, value: object) -> None:
    """Raises unless this is None or can be called."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {_shown(value)}, expected a function, or None to do without")


def check_batches(batches: object) -> None:
    """Raises unless this can be gone through batch by batch.

    Raises:
        InputError: nothing that can be iterated over, or what looks like one batch or a path.
    """
    # Not by `iter(batches)`: that starts a DataLoader's workers and draws random numbers.
    repeats = any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__"))
    if not repeats or isinstance(batches, str | bytes | Mapping):
        raise InputError(
            f"batches is {_shown(batches)}, expected a DataLoader or a list of batches; put a "
            "single batch into a list: [batch]"
        )


def check_repeatable(batches: Iterable[Any], passes: str) -> None:
    """Raises where the batches are gone after one pass.

    Args:
        batches: to be gone through several times.
        passes: how many passes are needed, for the message.

    Raises:
        InputError: an iterator, or no batches at all, see `check_batches`.
    """
    check_batches(batches)
    if isinstance(batches, Iterator) and iter(batches) is batches:
        raise InputError(
            f"batches is a {type(batches).__name__}, which can be gone through only once; {passes} "
            "passes are needed: give a list or a DataLoader"
        )


def observed_layers(model: nn.Module) -> dict[str, BatchStatisticsNorm]:
    """The layers with batch statistics by name, in the order of the model, each once."""
    return {
        name: module
        for name, module in modules_by_name(model).items()
        if isinstance(module, BatchStatisticsNorm)
    }


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """All modules, each once, under the names that they have without `torch.compile`.

    Of a wrapper and the module in it the latter is given, which is the one that hooks see.
    """
    return {
        ".".join(part for part in name.split(".") if part != _COMPILED): module
        for name, module in model.named_modules()
    }


def short_name(layer: Norm) -> str:
    """The layer's short name; of names for one class, the one whose options fit most closely."""
    if layer.registered_as:
        return layer.registered_as
    fitting = [
        info
        for info in (*NORMS.values(), *REGISTERED.values())
        if info.layer is type(layer)
        and all(getattr(layer, option, None) == value for option, value in info.presets.items())
    ]
    if not fitting:
        return layer.class_name
    return max(fitting, key=lambda info: len(info.presets)).name


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it was given to `torch.compile` or compiled in place."""
    return any(
        _COMPILED in module._modules or module._compiled_call_impl is not None
        for module in model.modules()
    )


def check_not_compiled(model: nn.Module, purpose: str) -> None:
    """Raises where hooks would be silently ignored.

    Raises:
        InputError: the model is compiled.
    """
    if is_compiled(model):
        raise InputError(
            f"{type(model).__name__} is compiled already, and compiled code ignores hooks that "
            f"come later: attach {purpose} to the model before torch.compile"
        )


def watch(
    layer: BatchStatisticsNorm, receive: Callable[[Moments], None], wanted: Callable[[], bool]
) -> RemovableHandle:
    """Calls `receive` with the moments of every training-mode input of the layer.

    Padding is what the call itself says (its `padding_mask` or the mask of the scope).

    Args:
        layer: the layer; it is not changed.
        receive: gets the moments on the layer's device; nothing waits for the device.
        wanted: asked before each call; the moments are computed only if it says so.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and wanted() and not _recomputing():
            receive(moments_of_call(layer, args, kwargs))

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


def moments_of_call(
    layer: BatchStatisticsNorm, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Moments:
    """Moments of what a call of the layer normalises, from the call's arguments."""
    return layer.token_moments(*arguments_of_call(layer, args, kwargs))


def arguments_of_call(
    layer: Norm, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """What a call of a norm normalises, features last, and the mask it was given.

    That is the sum with a residual, where there is one.
    """
    x: Tensor = args[0] if args else kwargs["x"]
    mask: Tensor | None = args[1] if len(args) > 1 else kwargs.get("padding_mask")
    residual: Tensor | None = args[2] if len(args) > 2 else kwargs.get("residual")
    return features_last(x if residual is None else x + residual, layer.feature_dim), mask


def _recomputing() -> bool:
    """Whether activation checkpointing repeats a forward; the scope of its mask is closed then."""
    return not torch.compiler.is_compiling() and in_backward()


def _shown(value: object) -> str:
    """A value for a message: what is short in full, of all else the type."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return f"a {type(value).__name__}"
