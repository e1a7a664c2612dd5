"""User-defined layers: checks, and their construction with the interface of all norms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, UnionType
from typing import Any, Final, Union, get_args, get_origin

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.base import Norm
from powernorm.norms.feature_dims import LAST, check_feature_dim

FOR_ALL: Final = ("device", "dtype", "feature_dim")
"""Options of every norm, even if the user's layer does not take them."""
_PLAIN: Final = frozenset({"int", "float", "bool", "str", "None"})
_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Layer = Callable[..., nn.Module]
"""A function that builds a module from a number of features and keyword options."""


def check_layer(name: str, layer: object) -> Layer:
    """Return a user's layer unchanged, after checking it.

    Raises:
        InputError: it does not build a module for a number of features.
    """
    if isinstance(layer, nn.Module):
        raise InputError(
            f"the layer of {name!r} is a {type(layer).__name__} that is built already: give its "
            "class, or a function of num_features"
        )
    if not callable(layer) or (isinstance(layer, type) and not issubclass(layer, nn.Module)):
        raise InputError(
            f"the layer of {name!r} is {title_of(layer)}, expected a class of torch.nn.Module or a "
            "function that builds one"
        )
    parameters_of(name, layer)
    return layer


def parameters_of(name: str, layer: Layer) -> dict[str, inspect.Parameter]:
    """Return the parameters of a layer besides the number of features.

    Raises:
        InputError: it has no signature, or no positional parameter.
    """
    try:
        parameters = inspect.signature(layer).parameters
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the signature of the layer of {name!r} cannot be read ({error}): give a function of "
            "num_features"
        ) from error
    first = next(iter(parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise InputError(
            f"the layer of {name!r} has no positional argument: the first has to be num_features"
        )
    more = list(parameters) if first.kind is first.VAR_POSITIONAL else list(parameters)[1:]
    return {key: parameters[key] for key in more}


def check_options(
    name: str,
    layer: Layer,
    options: Mapping[str, Any],
    *,
    title: str = "",
    choices: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    hidden: Collection[str] = (),
) -> None:
    """Check that a layer takes options; values are checked if their types are known.

    Args:
        name: short name, or `module:Class`.
        layer: a layer of this library or a user.
        options: by name.
        title: name of the layer in errors, by default its own name.
        choices: accepted values of annotations besides plain types: `repr`s, or a class.
        hidden: arguments of the layer that are not options.

    Raises:
        InputError: the layer does not take an option; the message lists its options.
    """
    parameters = parameters_of(name, layer)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    known = [
        key for key, one in parameters.items() if one.kind not in _VARIABLE and key not in hidden
    ]
    for key, value in options.items():
        if key in known:
            accepted = _accepted(parameters[key], choices)
            if not _fits(value, accepted):
                raise InputError(
                    f"option {key} of {name} is {value!r} ({type(value).__name__}), expected "
                    f"{' | '.join(accepted)}"
                )
        elif not takes_any and key not in FOR_ALL:
            raise InputError(
                f"{title or title_of(layer)} ({name}) has no option {key!r}, it takes "
                f"{', '.join(known) or 'none'}"
            )


def build_own(name: str, layer: Layer, num_features: int, options: Mapping[str, Any]) -> Norm:
    """Build a user's norm; a module that is not a `Norm` is wrapped in an `AdaptedNorm`.

    Args:
        name: short name, or `module:Class`.
        layer: checked by `check_layer`.
        num_features: C.
        options: options checked by `check_options`, and those of every norm.

    Raises:
        InputError: the layer lacks an argument, raises, or does not return such a module.
    """
    parameters = parameters_of(name, layer)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    # On the meta device initial parameter values are unknown, so the layer is moved afterwards.
    later = {"device"} if _is_meta(options.get("device")) else set()
    given = {
        key: value
        for key, value in options.items()
        if key not in later and (key in parameters or (takes_any and key not in FOR_ALL))
    }
    if "feature_dim" in parameters and not _is_norm_class(layer):
        # Passed in any case, as its default may differ from that of all norms.
        given.setdefault("feature_dim", LAST)
    missing = [
        key
        for key, one in parameters.items()
        if one.default is one.empty and one.kind not in _VARIABLE and key not in given
    ]
    if missing:
        raise InputError(
            f"{title_of(layer)} ({name}) also needs {', '.join(missing)}: give it as an option, by "
            "presets= of register_norm, or a default"
        )
    module = _built(name, layer, num_features, given)
    dim = options.get("feature_dim")
    norm = _as_norm(name, module, num_features, dim, looks_along="feature_dim" in given)
    norm.registered_as = name
    norm.built_with = dict(options)
    left: dict[str, Any] = {k: options.get(k) for k in ("device", "dtype") if k not in given}
    return norm.to(**left) if any(value is not None for value in left.values()) else norm


def is_same_layer(known: object, layer: object) -> bool:
    """Return whether both are the same object, or the same definition run again in a notebook."""
    places = [
        (getattr(one, "__module__", 0), getattr(one, "__qualname__", "<")) for one in (known, layer)
    ]
    return known is layer or (places[0] == places[1] and "<" not in places[0][1])


def title_of(layer: object) -> str:
    """Return a layer's name for a message."""
    return getattr(layer, "__qualname__", None) or repr(layer)


def _is_norm_class(layer: object) -> bool:
    return isinstance(layer, type) and issubclass(layer, Norm)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _built(name: str, layer: Layer, num_features: int, given: Mapping[str, Any]) -> nn.Module:
    try:
        module: object = layer(num_features, **given)
    except InputError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        raise InputError(
            f"{title_of(layer)} ({name}) cannot be built for {num_features} features: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise InputError(
            f"{title_of(layer)} ({name}) gave a {type(module).__name__}, expected a torch.nn.Module"
        )
    return module


def _as_norm(
    name: str, module: nn.Module, num_features: int, dim: int | None, *, looks_along: bool
) -> Norm:
    if not isinstance(module, Norm):
        dim = LAST if dim is None else dim
        return AdaptedNorm(module, num_features, feature_dim=dim, looks_along=looks_along)
    if module.num_features != num_features:
        raise InputError(
            f"{name} returned a norm of {module.num_features} features, expected {num_features}"
        )
    if dim is not None:
        module.feature_dim = check_feature_dim(dim)
    return module


def _accepted(
    parameter: inspect.Parameter, choices: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the types and values that a parameter takes; empty if there are unknown ones.

    Without an annotation the type of the default counts.
    """
    annotation, default = parameter.annotation, parameter.default
    if annotation is parameter.empty:
        kinds = {bool: ("bool",), int: ("int", "float"), float: ("int", "float"), str: ("str",)}
        return (*kinds[type(default)], "None") if type(default) in kinds else ()
    parts: tuple[object, ...] = (annotation,)
    if isinstance(annotation, str):
        parts = tuple(part.strip() for part in annotation.split("|"))
    elif get_origin(annotation) in (Union, UnionType):
        parts = get_args(annotation)
    names = [part if isinstance(part, str) else _type_name(part) for part in parts]
    is_known = all(name in _PLAIN or name in choices for name in names)
    return tuple(one for name in names for one in choices.get(name, (name,)) if is_known)


def _type_name(annotation: object) -> str:
    return "None" if annotation is type(None) else getattr(annotation, "__name__", "")


def _fits(value: Any, accepted: Collection[str]) -> bool:
    """Return whether a value is of one of the types, or one of the values."""
    if not accepted:
        return True
    if value is None:
        return "None" in accepted
    if isinstance(value, bool):
        return "bool" in accepted
    if isinstance(value, int):
        return "int" in accepted or "float" in accepted
    if isinstance(value, float):
        return "float" in accepted
    if isinstance(value, str):
        return "str" in accepted or "torch.device" in accepted or repr(value) in accepted
    return any("." in one for one in accepted)  # a class, such as torch.dtype
