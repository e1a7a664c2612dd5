"""Records in JSON files: `powernorm_lab.runs`, work.json and parts of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from math import copysign, inf
from pathlib import Path
from reprlib import Repr
from typing import Any, Final, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from powernorm.errors import InputError
from powernorm.json_reading import read_json_object

LARGEST: Final = 1e100
"""A larger number counts as infinite: sums, percents and axes beyond it would overflow."""

Record = TypeVar("Record")

_WORDS: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "int_type": "a whole number below 2^63",
    "float_type": "a number",
    "dict_type": "an object",
    "list_type": "a list",
    "dataclass_type": "an object",
}
"""Expected values by pydantic's types of errors."""
_MAX_WHOLE: Final = 2**63 - 1
"""Largest count in a file."""
_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def written(record: object) -> dict[str, Any]:
    """Convert a record for JSON: all fields except those with their defaults.

    Args:
        record: instance of a dataclass of `powernorm_lab.runs`.
    """
    adapter = _adapter(cast(Any, type(record)))
    return cast(dict[str, Any], adapter.dump_python(record, exclude_defaults=True))


def read_record(kind: type[Record], path: Path, hint: str, *, exact: bool = False) -> Record:
    """Read a record from a JSON file.

    Args:
        kind: class of `powernorm_lab.runs`. Keys that it does not declare are ignored.
        path: path of the file.
        hint: how to repair the file, appended to every error message.
        exact: keep numbers beyond 1e100, for records that are written again. Otherwise they become
            infinite, because they would overflow in figures and averages.

    Raises:
        InputError: the file cannot be read, a value is missing or has another type, or the file has
            the format of a newer version; the message names file and key.
    """
    return record_of(kind, read_json_object(path, hint), str(path), hint, exact=exact)


def record_of(
    kind: type[Record],
    values: object,
    place: str,
    hint: str,
    trail: tuple[str | int, ...] = (),
    *,
    exact: bool = False,
) -> Record:
    """Convert values of a JSON file to a record.

    Args:
        kind: as in `read_record`.
        values: contents of the file or of a line.
        place: file and line, for error messages.
        hint: as in `read_record`.
        trail: keys and indices of the values in the file.
        exact: as in `read_record`.

    Raises:
        InputError: as `read_record`.
    """
    values = values if exact else _bounded(values)
    try:
        # Lone surrogates, which an edited file may contain as escapes, become question marks.
        dumped = json.dumps(values, ensure_ascii=False, allow_nan=not exact)
        text = dumped.encode(errors="replace")
    except ValueError as error:
        raise InputError(f"{place}: a number is infinite or NaN; {hint}") from error
    try:
        # Strict validation of Python values does not accept a dict for a dataclass.
        return cast(Record, _adapter(cast(Any, kind)).validate_json(text, strict=True))
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A wrong format explains all other errors, and a wrong value explains more than a missing one.
    first = min(details, key=lambda one: (one["loc"] != ("format",), one["type"] == "missing"))
    raise InputError(f"{place}: {_explained(first, trail)}; {hint}")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _explained(error: Any, trail: tuple[str | int, ...]) -> str:
    keys = (*trail, *error["loc"]) or ("the file",)
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    name = "".join(parts).removeprefix(".")
    if error["type"] == "missing":
        return f"{name} is missing"
    value = error["input"]
    if error["type"] == "value_error":  # raised by a record's __post_init__
        return f"{name}: {error['ctx']['error']}"
    found = f"{name} is {'null' if value is None else _SHORT.repr(value)}"
    if error["type"] != "literal_error":
        return f"{found}, expected {_WORDS.get(error['type'], error['msg'])}"
    expected = error["ctx"]["expected"]
    if keys == ("format",):
        found += f", this version reads {expected}"
        return f"{found}: update powernorm if a newer version wrote the file"
    return (
        f"{found}, expected {expected} (a newer version of powernorm may know more: update it if "
        "one wrote the file)"
    )


def bounded(value: float) -> float:
    """Return the number, or infinity if it is too large to be drawn or averaged.

    >>> bounded(-7), bounded(1e280), bounded(-(10**400))
    (-7.0, inf, -inf)
    """
    try:
        number = float(value)
    except OverflowError:
        return inf if value > 0 else -inf
    return copysign(inf, number) if abs(number) > LARGEST else number


def _bounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_bounded(item) for item in value]
    is_large = type(value) is int and abs(value) > _MAX_WHOLE
    return bounded(value) if is_large or type(value) is float else value
