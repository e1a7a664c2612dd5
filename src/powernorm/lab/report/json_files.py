"""Reading the JSON files of a run folder; what cannot be used is named by its file and key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.json_reading import read_json_object
from powernorm.lab.report.magnitudes import bounded

_WORDS: Final[Mapping[type, str]] = {
    str: "a string",
    int: "a whole number",
    dict: "an object",
    list: "a list",
}
_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 60

MAX_WHOLE: Final = 2**63 - 1
"""No count in a file is larger."""


@dataclass(frozen=True)
class JsonObject:
    """An object of a JSON file, read key by key.

    Attributes:
        path: of the file.
        values: what the object holds.
        mend: how to mend the file; the end of every error.
        trail: where in the file the object lies, `layers[3].`.

    Each method raises an InputError that names file and key where the value is missing or is of
    another type.
    """

    path: Path
    values: Mapping[str, Any]
    mend: str
    trail: str = ""

    def text(self, key: str) -> str:
        """A string."""
        return str(self._typed(key, str))

    def whole(self, key: str) -> int:
        """A whole number."""
        value = int(self._typed(key, int))
        if abs(value) > MAX_WHOLE:
            raise self.error(f"{key} is {_SHORT.repr(value)}, expected a whole number below 2^63")
        return value

    def number(self, key: str) -> float | None:
        """A number, or None."""
        value = self._value(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return bounded(value)
        raise self.error(f"{key} is {_SHORT.repr(value)}, expected a number or null")

    def sure_number(self, key: str) -> float:
        """A number that must be there."""
        value = self.number(key)
        if value is None:
            raise self.error(f"{key} is null, expected a number")
        return value

    def choice(self, key: str, known: Iterable[str]) -> str:
        """A string of those known."""
        value = self.text(key)
        if value not in known:
            raise self.error(
                f"{key} is {value!r}, expected one of {', '.join(known)} (a newer version of "
                "powernorm may know more: update it if one wrote the file)"
            )
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object with keys of its own."""
        return dict(self._typed(key, dict))

    def child(self, key: str) -> "JsonObject":
        """An object, to be read key by key in turn."""
        return JsonObject(self.path, self.mapping(key), self.mend, f"{self.trail}{key}.")

    def children(self, key: str) -> list["JsonObject"]:
        """A list of objects."""
        found = []
        for index, value in enumerate(self._typed(key, list)):
            if not isinstance(value, dict):
                raise self.error(f"{key}[{index}] is {_SHORT.repr(value)}, expected an object")
            trail = f"{self.trail}{key}[{index}]."
            found.append(JsonObject(self.path, value, self.mend, trail))
        return found

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        values = self._typed(key, list)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(f"{key}[{index}] is {_SHORT.repr(value)}, expected a string")
        return list(values)

    def numbers(self, key: str) -> list[float]:
        """A list of numbers."""
        values = self._typed(key, list)
        for index, value in enumerate(values):
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise self.error(f"{key}[{index}] is {_SHORT.repr(value)}, expected a number")
        return [bounded(value) for value in values]

    def check_format(self, known: int, writer: str) -> None:
        """Refuses a file of another format.

        Args:
            known: the newest format that can be read.
            writer: the command that writes such files.
        """
        found = self.values.get("format")
        if found == known and not isinstance(found, bool):
            return
        message = f"{self.path}: format is {_SHORT.repr(found)}, this version reads {known}; "
        if isinstance(found, int) and found > known:
            raise InputError(
                f"{message}a newer version of powernorm wrote the file: update powernorm"
            )
        raise InputError(f"{message}write the file again with {writer}")

    def error(self, message: str) -> InputError:
        """The error that names this file and this place."""
        return InputError(f"{self.path}: {self.trail}{message}; {self.mend}")

    def _typed(self, key: str, kind: type) -> Any:
        value = self._value(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(f"{key} is {_SHORT.repr(value)}, expected {_WORDS[kind]}")
        return value

    def _value(self, key: str) -> object:
        if key not in self.values:
            raise self.error(f"{key} is missing")
        return self.values[key]


def read_object(path: Path, mend: str) -> JsonObject:
    """The object that a JSON file holds.

    Args:
        path: of the file.
        mend: how to mend it; the end of every error.

    Raises:
        InputError: the file cannot be read, is not JSON, or holds no object.
    """
    return JsonObject(path, read_json_object(path, mend), mend)
