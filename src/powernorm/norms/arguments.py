"""Checks of constructor arguments: each returns the value or raises an InputError."""

from __future__ import annotations

from typing import Literal, cast

import torch

from powernorm.errors import InputError

Variant = Literal["paper", "released"]


def check_share(name: str, value: float) -> float:
    """A weight in (0, 1], or an InputError that names it."""
    if not 0 < value <= 1:
        raise InputError(
            f"{name} is {value!r}, expected a number in (0, 1]: it is the weight of the new batch "
            "(the papers' α is 1 - momentum)"
        )
    return value


def check_groups(groups: int | None, num_features: int) -> int | None:
    """A number of groups that divides the features, or None; else an InputError."""
    if groups is not None and (groups < 1 or num_features % groups):
        raise InputError(
            f"groups is {groups!r}, expected None or a divisor of the {num_features} features"
        )
    return groups


def check_count(name: str, value: int, least: int) -> int:
    """An integer of at least `least`, or an InputError that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is {value!r}, expected an integer of at least {least}")
    return value


def check_variant(variant: str) -> Variant:
    """`paper` or `released`, or an InputError."""
    if variant not in ("paper", "released"):
        raise InputError(f"variant is {variant!r}, expected 'paper' or 'released'")
    return cast(Variant, variant)


def feature_count(num_features: int | tuple[int, ...]) -> int:
    """C from an integer or a 1-tuple (torch's `normalized_shape`), or an InputError."""
    if isinstance(num_features, tuple | list | torch.Size):
        if len(num_features) != 1:
            raise InputError(
                f"num_features is {tuple(num_features)}, expected an integer or a 1-tuple: these "
                "norms work on the last dimension alone"
            )
        num_features = num_features[0]
    return check_count("num_features", num_features, 1)
