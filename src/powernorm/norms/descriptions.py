"""Conversion of a norm to JSON, its name and options, and back."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from powernorm.errors import InputError
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.base import Norm
from powernorm.norms.named_layers import loaded_class
from powernorm.norms.own_layers import build_own, check_options
from powernorm.norms.registry import NORMS, NormInfo, build_norm, short_name

_UNTOLD: Final = ("device", "dtype", "process_group", "track_running_stats")
"""Arguments that depend on the process or device, or have only one value."""

_ATTRIBUTES: Final = {
    **{name: f"initial_{name}" for name in ("alpha", "shift", "spread", "eta")},
    "penalty": "divergence",
}
"""Attribute names of arguments, where the two differ."""


def describe_norm(norm: Norm) -> tuple[str, dict[str, Any], str]:
    """Return what a norm is built from, without its parameters and statistics.

    Returns:
        Its short name, or `module:Class`; its options beyond the name's presets, as JSON, with
        attributes changed since it was built; and module and name of its class, `""` for a norm of
        this library.

    Raises:
        InputError: a user-defined class without a name, or options that are not JSON.
    """
    name = short_name(norm)
    if norm.registered_as:
        options = {key: norm.built_with[key] for key in norm.built_with if key not in _UNTOLD}
    elif name in NORMS:
        options = _options_of(norm, NORMS[name])
    else:
        raise InputError(
            f"{type(norm).__name__} is your own norm and has no name from which it can be "
            f"rebuilt: call powernorm.register_norm('my-norm', {type(norm).__name__}), then "
            "powernorm.build_norm or powernorm.swap with that name"
        )
    _check_json(name, options)
    source = _source_of(norm) if norm.registered_as else ""
    if source:
        _check_unchanged(norm, rebuild_norm(name, norm.num_features, options, source), name)
    return name, options, source


def rebuild_norm(
    name: str, num_features: int, options: Mapping[str, Any], source: str, **more: Any
) -> Norm:
    """Build a norm; only code of norms that this process knows or has registered runs.

    Args:
        name: short name, or `module:Class`.
        num_features: C.
        options: as `describe_norm` returns them.
        source: as `describe_norm` returns it.
        more: `device` and `dtype`.

    Raises:
        InputError: the name is unknown in this process, or does not take the options.
    """
    if not options.keys().isdisjoint(_UNTOLD):
        raise InputError(f"the options of {name} have one of {', '.join(_UNTOLD)}")
    if ":" in name:
        layer = loaded_class(name)
        check_options(name, layer, options)
        norm = build_own(name, layer, num_features, {**options, **more})
    else:
        norm = build_norm(name, num_features, **options, **more)
    if source and _source_of(norm) != source:
        raise InputError(
            f"the norm {name!r} is {_source_of(norm)} in this process and was {source}: register "
            "the latter"
        )
    return norm


def _check_unchanged(norm: Norm, built: Norm, name: str) -> None:
    """Raise an InputError if a user-defined norm's settings changed after it was built."""
    for here, there in zip(norm.modules(), built.modules(), strict=False):
        for key, value in vars(there).items():
            plain = isinstance(value, int | float | str | None) and key != "training"
            if plain and not key.startswith("_") and vars(here).get(key) != value:
                raise InputError(
                    f"{key} of a {norm.class_name} is {vars(here).get(key)!r}, but it was built "
                    f"with {value!r}: build it with its current value, as an option of {name!r}"
                )


def _check_json(name: str, options: Mapping[str, Any]) -> None:
    try:
        same = json.loads(json.dumps(options)) == options
    except (TypeError, ValueError) as error:
        raise InputError(f"the options of {name} are not JSON: {error}") from error
    if not same:
        raise InputError(
            f"the options of {name}, {dict(options)}, change when they are read back from JSON: "
            "use lists instead of tuples, and strings as keys"
        )


def _source_of(norm: Norm) -> str:
    cls = type(norm.layer if isinstance(norm, AdaptedNorm) else norm)
    return f"{cls.__module__}:{cls.__qualname__}"


def _options_of(norm: Norm, info: NormInfo) -> dict[str, Any]:
    """Return the options of one of this library's norms that differ from its name's presets."""
    options: dict[str, Any] = {}
    for key, parameter in list(inspect.signature(info.layer).parameters.items())[1:]:
        value = _value(norm, key)
        if key not in _UNTOLD and value != info.presets.get(key, parameter.default):
            options[key] = value
    if not options.get("affine", True):
        options.pop("bias", None)
    return options


def _value(norm: nn.Module, option: str) -> Any:
    if option == "affine":
        return any(getattr(norm, name, None) is not None for name in ("weight", "bias"))
    if option == "bias":
        return getattr(norm, "bias", None) is not None
    return getattr(norm, _ATTRIBUTES.get(option, option), None)
