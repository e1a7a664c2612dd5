"""Records as JSON files hold them: `powernorm_lab.runs`, work.json and parts of settings."""

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
"""By pydantic's kind of error, what was expected."""
_MAX_WHOLE: Final = 2**63 - 1
"""No count in a file is larger."""
_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def written(record: object) -> dict[str, Any]:
    """Return what a JSON file says of a record: all fields but those that have their default.

    Args:
        record: of a dataclass of `powernorm_lab.runs`.
    """
    adapter = _adapter(cast(Any, type(record)))
    return cast(dict[str, Any], adapter.dump_python(record, exclude_defaults=True))


def read_record(kind: type[Record], path: Path, mend: str, *, exact: bool = False) -> Record:
    """Return the record that a JSON file holds.

    Args:
        kind: a class of `powernorm_lab.runs`. Keys that it does not declare are left out.
        path: of the file.
        mend: how to mend the file; the end of every error.
        exact: leave numbers beyond 1e100 as they are, which is for records that are written again.
            Else they become infinite, as figures and averages cannot carry them.

    Raises:
        InputError: the file cannot be read, a value is missing or of another type, or the file has
            a format of a newer version; the message names file and key.
    """
    return record_of(kind, read_json_object(path, mend), str(path), mend, exact=exact)


def record_of(
    kind: type[Record],
    values: object,
    place: str,
    mend: str,
    trail: tuple[str | int, ...] = (),
    *,
    exact: bool = False,
) -> Record:
    """Return values of a JSON file as a record.

    Args:
        kind: as in `read_record`.
        values: what the file, or a line of it, holds.
        place: the file and its line, for errors.
        mend: as in `read_record`.
        trail: keys and places in lists that lead to the values.
        exact: as in `read_record`.

    Raises:
        InputError: as `read_record`.
    """
    values = values if exact else _bounded(values)
    try:
        # Halves of letters, which escapes in an edited file may stand for, become question marks.
        dumped = json.dumps(values, ensure_ascii=False, allow_nan=not exact)
        text = dumped.encode(errors="replace")
    except ValueError as error:
        raise InputError(f"{place}: a number is infinite or NaN; {mend}") from error
    try:
        # From Python values, strict validation takes no dict for a dataclass.
        return cast(Record, _adapter(cast(Any, kind)).validate_json(text, strict=True))
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A wrong format explains everything else, and a wrong value more than a missing one.
    first = min(details, key=lambda one: (one["loc"] != ("format",), one["type"] == "missing"))
    raise InputError(f"{place}: {_explained(first, trail)}; {mend}")


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
    if error["type"] == "value_error":  # of a class of ours
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
    """Return the number, infinite where it is too large to be drawn or averaged.

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
