"""Checks of constructor arguments: each returns the value or raises an InputError."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import nn

from powernorm.errors import InputError

Variant = Literal["paper", "released"]
Start = Literal["average", "torch"]
"""How running statistics start."""
TokenKind = Literal["ln", "rms"]
"""Kind of per-token norm."""

_Choice = TypeVar("_Choice")


def check_number(
    name: str, value: float, *, above: float | None = None, at_least: float | None = None
) -> float:
    """Return a finite number within its bound, or raise an InputError that names it."""
    bound = ""
    if above is not None:
        bound = f" above {above}"
    elif at_least is not None:
        bound = f" of at least {at_least}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_number and math.isfinite(value)
    fits = fits and (above is None or value > above) and (at_least is None or value >= at_least)
    if not fits:
        raise InputError(f"{name} is {value!r}, expected a finite number{bound}")
    return value


def check_flag(name: str, value: bool) -> bool:
    """Return True or False, or raise an InputError that names it."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected True or False")
    return value


def check_share(name: str, value: float) -> float:
    """Return a weight in (0, 1], or raise an InputError that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InputError(
            f"{name} is {value!r}, expected a number in (0, 1]: it is the weight of the new batch "
            "(the papers' α is 1 - momentum)"
        )
    return value


def check_tracking(track_running_stats: bool) -> None:
    """Raise an InputError unless torch's argument of this name is True."""
    if check_flag("track_running_stats", track_running_stats):
        return
    raise InputError(
        "track_running_stats is False, so evaluation would depend on the other inputs in the "
        "batch: omit it, or use torch.nn.BatchNorm1d(track_running_stats=False)"
    )


def check_groups(groups: int, num_features: int) -> int:
    """Return a number of groups that divides the features, or raise an InputError."""
    if (
        isinstance(groups, bool)
        or not isinstance(groups, int)
        or groups < 1
        or num_features % groups
    ):
        raise InputError(f"groups is {groups!r}, expected a divisor of the {num_features} features")
    return groups


def check_count(name: str, value: int, least: int) -> int:
    """Return an integer of at least `least`, or raise an InputError that names it."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise InputError(f"{name} is {value!r}, expected an integer of at least {least}")
    return count


def check_choice(name: str, value: _Choice, choices: Sequence[object]) -> _Choice:
    """Return one of several values, or raise an InputError that lists them."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise InputError(f"{name} is {value!r}, expected {', '.join(others)} or {last}")
    return value


def feature_count(num_features: int | tuple[int, ...]) -> int:
    """Return C from an integer or 1-tuple (torch's `normalized_shape`), or raise an InputError."""
    if isinstance(num_features, tuple | list | torch.Size):
        if len(num_features) != 1:
            raise InputError(
                f"num_features is {tuple(num_features)}, expected an integer or a 1-tuple: these "
                "norms work on the last dimension alone"
            )
        num_features = num_features[0]
    return check_count("num_features", num_features, 1)


def check_model(model: object, name: str = "model") -> None:
    """Raise an InputError unless this is a module; `name` is the argument's name."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} is {shown(model)}, expected a torch.nn.Module: give the model itself"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"{name} is a TorchScript module, whose parts cannot be looked at or replaced: give "
            "the model that torch.jit.script or torch.jit.trace was called with"
        )


def check_function(name: str, value: object) -> None:
    """Raise an InputError unless this is None or can be called."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {shown(value)}, expected a function or None")


def shown(value: object) -> str:
    """Return a value as text for a message: in full if it is short, else its type."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return f"a {type(value).__name__}"
