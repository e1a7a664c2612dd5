"""Parsing of options' values from the command line: `eps=1e-5`."""

import math
import tomllib
from collections.abc import Iterable
from typing import Any, Final

from powernorm.errors import InputError

OptionValue = int | float | bool | str | None
NONE_WORDS: Final = ("none", "null")


def parse_options(assignments: Iterable[str]) -> dict[str, OptionValue]:
    """Return options of a norm, each written as `key=value`.

    Raises:
        InputError: an option has no `=`.
    """
    options = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise InputError(f"{assignment!r} is not an option: write key=value, e.g. eps=1e-5")
        options[key] = option_value(text)
    return options


def option_value(text: str) -> OptionValue:
    """Return the value of an option: TOML's, None for "none", else the text itself."""
    if text.lower() in NONE_WORDS:
        return None
    value = toml_value(text)
    # JSON has no floats that are not finite, so they stay texts, which no norm accepts as a number.
    is_usable = isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_usable else text


def toml_value(text: str) -> Any:
    """Return a text as a TOML value, or the text itself if it is not TOML."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, a number of thousands of digits, or deep lists
        return text
    return read["value"] if len(read) == 1 else text
