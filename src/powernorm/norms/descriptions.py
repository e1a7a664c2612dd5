"""A norm as JSON, its name and options, and the same norm built from that."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from powernorm.errors import InputError
from powernorm.norms.base import Norm
from powernorm.norms.registry import NORMS, NormInfo, build_norm, short_name

_UNTOLD: Final = ("device", "dtype", "process_group", "track_running_stats")
"""Arguments that belong to a process or a tensor, or have one value."""


@dataclass(frozen=True)
class NormDescription:
    """What a norm was built by; its parameters and statistics are not part of it.

    Args:
        name: short name, or `module:Class`.
        num_features: C.
        options: keyword arguments that are not the name's own; JSON.
    """

    name: str
    num_features: int
    options: Mapping[str, Any]

    @classmethod
    def of(cls, norm: Norm) -> NormDescription:
        """Return the description of a norm, with what was set since it was built.

        Raises:
            InputError: a class of one's own without a name, or options that are no JSON.
        """
        name = short_name(norm)
        if norm.registered_as:
            options = {key: norm.built_with[key] for key in norm.built_with if key not in _UNTOLD}
        elif name in NORMS:
            options = _options_of(norm, NORMS[name])
        else:
            raise InputError(
                f"{type(norm).__name__} is a norm of your own without a name, by which it could be "
                f"built again: powernorm.register_norm('my-norm', {type(norm).__name__}), and "
                "powernorm.build_norm or powernorm.swap by that name"
            )
        try:
            json.dumps(options)
        except (TypeError, ValueError) as error:
            raise InputError(f"the options of {name} are no JSON: {error}") from error
        return cls(name, norm.num_features, options)

    def build(self, **more: Any) -> Norm:
        """Build the norm.

        Args:
            more: `device` and `dtype`.

        Raises:
            InputError: the name is not known in this process, or does not take the options.
        """
        module, separator, _ = self.name.partition(":")
        # A file must not make this process import, and so run, what it names.
        if separator and module not in sys.modules:
            raise InputError(
                f"the model has the norm {self.name!r} of a module that is not loaded: "
                f"`import {module}` first, if you trust it"
            )
        return build_norm(self.name, self.num_features, **self.options, **more)


def _options_of(norm: Norm, info: NormInfo) -> dict[str, Any]:
    """Return the options of one of this library's norms that its name does not set by itself."""
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
        return any(norm._parameters.get(name) is not None for name in ("weight", "bias"))
    if option == "bias":
        return norm._parameters.get("bias") is not None
    return getattr(norm, "initial_alpha" if option == "alpha" else option, None)
