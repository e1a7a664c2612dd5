"""Reading the records of `powernorm.runs` from JSON, by the classes that write them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from reprlib import Repr
from typing import Any, Final, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from powernorm.errors import InputError
from powernorm.json_reading import read_json_object
from powernorm.lab.report.magnitudes import bounded

Record = TypeVar("Record")

_WORDS: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "int_type": "a whole number below 2^63",
    "float_type": "a number",
    "dict_type": "an object",
    "list_type": "a list",
}
"""By pydantic's kind of error, what was expected."""
_MAX_WHOLE: Final = 2**63 - 1
"""No count in a file is larger."""
_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def read_record(kind: type[Record], path: Path, mend: str) -> Record:
    """Return the record that a JSON file holds.

    Args:
        kind: a class of `powernorm.runs`. Keys that it does not declare are left out. Numbers
            beyond 1e100 become infinite, as figures and averages cannot carry them.
        path: of the file.
        mend: how to mend the file; the end of every error.

    Raises:
        InputError: the file cannot be read, a value is missing or of another type, or the file has
            a format of a newer version; the message names file and key.
    """
    return record_of(kind, read_json_object(path, mend), str(path), mend)


def record_of(
    kind: type[Record], values: object, place: str, mend: str, trail: tuple[str | int, ...] = ()
) -> Record:
    """Return values of a JSON file as a record.

    Args:
        kind: as in `read_record`.
        values: what the file, or a line of it, holds.
        place: the file and its line, for errors.
        mend: as in `read_record`.
        trail: keys and places in lists that lead to the values.

    Raises:
        InputError: as `read_record`.
    """
    try:
        return cast(
            Record, _adapter(cast(Any, kind)).validate_python(_bounded(values), strict=True)
        )
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


def _bounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_bounded(item) for item in value]
    is_large = type(value) is int and abs(value) > _MAX_WHOLE
    return bounded(value) if is_large or type(value) is float else value
