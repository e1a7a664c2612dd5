"""Checks of the fields of a configuration, by their dotted keys."""

import math

from powernorm.errors import InputError


def check_at_least(key: str, value: int, least: int) -> None:
    """Check a number against its least value.

    Raises:
        InputError: it is not so; the message names the key and the value.
    """
    if value < least:
        raise InputError(f"{key}={value} is too small: give at least {least}.")


def check_positive(key: str, value: float) -> None:
    """Check that a number is finite and above 0.

    Raises:
        InputError: it is not so; the message names the key and the value.
    """
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{key}={value} must be a finite number above 0.")


def check_not_negative(key: str, value: float) -> None:
    """Check that a number is finite and not below 0.

    Raises:
        InputError: it is not so; the message names the key and the value.
    """
    if not (value >= 0 and math.isfinite(value)):
        raise InputError(f"{key}={value} must be a finite number, 0 or above.")


def check_fraction(key: str, value: float, *, below_one: bool = False) -> None:
    """Check that a number is from 0 to 1.

    Raises:
        InputError: it is not so; the message names the key and the value.
    """
    if not 0 <= value <= 1 or (below_one and value == 1):
        bounds = "0 ≤ value < 1" if below_one else "0 ≤ value ≤ 1"
        raise InputError(f"{key}={value} must be a fraction, {bounds}.")


def check_one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Check a choice.

    Raises:
        InputError: it is not so; the message names the key and the value.
    """
    if value not in known:
        raise InputError(f"{key}={value!r} is not known: choose one of {', '.join(known)}.")


def check_distinct(key: str, values: tuple[object, ...]) -> None:
    """Check that a list has entries, each once.

    Raises:
        InputError: it is not so; the message names the key and the value.
    """
    if not values:
        raise InputError(f"{key} is empty: give at least one.")
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise InputError(f"{key} names {', '.join(repeated)} more than once: give each one once.")
