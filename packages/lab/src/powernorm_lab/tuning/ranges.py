"""Search ranges of a tuning, and their syntax."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, pi
from typing import Any, Final, Literal, cast, get_args

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from powernorm.errors import InputError
from powernorm.option_values import OptionValue, parse_options
from powernorm_lab.settings.overrides import split_settings
from powernorm_lab.settings.section import shown

Kind = Literal["log", "linear", "int", "choice"]
FIXED: Final = "fixed"
"""Replacement of a range for a setting that is not searched."""
SYNTAX: Final = (
    "give log:LOW:HIGH or linear:LOW:HIGH (numbers), int:LOW:HIGH (whole numbers), choice:A,B,… "
    "(values), or fixed (not searched)"
)
EXAMPLE: Final = "optimizer.learning_rate=log:1e-4:1e-2"


@dataclass(frozen=True)
class Range:
    """Range of values of one setting."""

    kind: Kind
    text: str
    """Range in the syntax of `--search`."""
    values: tuple[OptionValue, ...]
    """Lowest and highest value; all values of a choice."""

    def distribution(self) -> BaseDistribution:
        """Return Optuna's distribution."""
        if self.kind == "choice":
            return CategoricalDistribution(self.values)
        low, high = cast(tuple[float, float], self.values)
        if self.kind == "int":
            return IntDistribution(int(low), int(high))
        return FloatDistribution(low, high, log=self.kind == "log")

    def probes(self) -> tuple[OptionValue, ...]:
        """Return values that a setting must take: all of a choice, or both ends and a fraction."""
        if self.kind in ("int", "choice"):
            return self.values
        low, high = cast(tuple[float, float], self.values)
        return low, low + (high - low) / pi, high

    def holds(self, value: Any) -> bool:
        """Return whether a value is in the range."""
        if self.kind == "choice":
            return value in self.values
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        low, high = cast(tuple[float, float], self.values)
        return low <= value <= high and (self.kind != "int" or value == int(value))


Space = Mapping[str, Range]
"""Ranges by the dotted key of the setting."""


def parse_range(key: str, text: str) -> Range:
    """Parse a range.

    Args:
        key: key of the setting, for error messages.
        text: range such as `log:1e-4:1e-2`.

    Raises:
        InputError: the text is not a range.

    >>> parse_range("optimizer.learning_rate", "log:1e-4:1e-2").values
    (0.0001, 0.01)
    """
    kind, _, rest = text.partition(":")
    if kind not in get_args(Kind):
        raise InputError(f"{key}={text} is not a range: {SYNTAX}")
    if kind == "choice":
        values = tuple(_value(part) for part in rest.split(","))
        if len(set(map(repr, values))) < max(2, len(values)) or "" in values:
            raise InputError(f"{key}={text} needs at least two different values: {SYNTAX}")
        return Range("choice", text, values)
    ends = [_number(part, whole=kind == "int") for part in rest.split(":")]
    if len(ends) != 2 or None in ends:
        raise InputError(f"{key}={text} needs two numbers, the lowest and the highest: {SYNTAX}")
    low, high = cast(list[float], ends)
    if low >= high:
        raise InputError(f"{key}={text}: {low:g} is not below {high:g}: {SYNTAX}")
    if kind == "log" and low <= 0:
        raise InputError(f"{key}={text}: a logarithmic range must begin above 0: {SYNTAX}")
    return Range(cast(Kind, kind), text, (low, high))


def parse_search(
    search: Iterable[str] | Mapping[str, str],
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Split ranges into those of settings and those of options by norm, all as strings.

    Args:
        search: strings `key=range`, or ranges by key.

    Raises:
        InputError: an item is not of this form.
    """
    given = [f"{k}={v}" for k, v in search.items()] if isinstance(search, Mapping) else search
    for item in given:
        if "=" not in item:
            raise InputError(f"{item!r} is not of the form KEY=RANGE, such as {EXAMPLE}")
    settings, options = split_settings(given)
    return settings, {n: {k: str(v) for k, v in own.items()} for n, own in options.items()}


def option_key(norm: str, option: str) -> str:
    """Return the dotted key of a norm's option, as for `--set`."""
    return f"norm_options.{norm}.{option}"


@dataclass(frozen=True)
class Point:
    """Line of a grid: a norm with the values of a trial or the chosen values."""

    norm: str
    values: Mapping[str, Any]
    """Values by dotted key."""
    number: int | None = None
    """Number of the trial, from 0; None for the final comparison."""

    @property
    def label(self) -> str:
        """Name of the line for its folder and in tables."""
        name = self.norm.replace(":", ".")
        return name if self.number is None else f"{name}-trial{self.number}"

    def norm_options(self) -> dict[str, Any]:
        """Return the values of the norm's options, by option."""
        start = option_key(self.norm, "")
        return {
            key.removeprefix(start): v for key, v in self.values.items() if key.startswith(start)
        }

    def settings(self) -> dict[str, Any]:
        """Return the values of settings, by dotted key."""
        return {key: v for key, v in self.values.items() if not key.startswith("norm_options.")}


def value_text(value: Any) -> str:
    """Format a value for `--set`."""
    return repr(value) if isinstance(value, float) else shown(value)


def _value(text: str) -> OptionValue:
    return parse_options([f"value={text.strip()}"])["value"] if text.strip() else ""


def _number(text: str, *, whole: bool) -> float | None:
    try:
        number: float = int(text) if whole else float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
