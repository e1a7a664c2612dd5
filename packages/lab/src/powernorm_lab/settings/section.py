"""Sections of settings: typed and immutable, checked when they are created.

A section is a strict, frozen pydantic dataclass, so that `dataclasses.replace` changes it and
checks the change. An invalid value raises an `InputError` that names the setting by its dotted key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, Strict, ValidationError
from pydantic.dataclasses import dataclass

from powernorm.errors import InputError

Positive = Annotated[int, Field(ge=1, lt=2**63)]
NotNegative = Annotated[int, Field(ge=0, lt=2**63)]
PositiveNumber = Annotated[float, Field(gt=0)]
NotNegativeNumber = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[tuple[str, ...], Strict(False)]
Seeds = Annotated[tuple[NotNegative, ...], Strict(False)]
RisingIds = Annotated[tuple[Positive, ...], Strict(False)]

_CONFIG: Final = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    use_attribute_docstrings=True,
)

_WORDS: Final = {
    "greater_than_equal": "is too small: give at least {ge}",
    "greater_than": "is too small: give a number above {gt}",
    "less_than_equal": "is too large: give at most {le}",
    "less_than": "is too large: give a number below {lt}",
    "finite_number": "is not finite: give a number",
    "int_type": "has the wrong type: expected a whole number",
    "int_from_float": "has the wrong type: expected a whole number",
    "int_parsing_size": "is too large: give a number below 2^63",
    "float_type": "has the wrong type: expected a number",
    "bool_type": "has the wrong type: expected true or false",
    "string_type": "has the wrong type: expected a string",
    "dataclass_type": "belongs to another task: expected {class_name}",
    "dataclass_exact_type": "belongs to another task: expected {class_name}",
    "dict_type": "has the wrong type: expected a table",
    "mapping_type": "has the wrong type: expected a table",
    "tuple_type": "has the wrong type: expected a list",
    "literal_error": "is not known: choose one of {expected}",
}
"""Problem with a value and its fix, by pydantic's types of errors."""

_Section = TypeVar("_Section")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def section(name: str = "", *, kw_only: bool = True) -> Callable[[type[_Section]], type[_Section]]:
    """Make a class a section of settings.

    Args:
        name: name of the section in dotted keys; empty for settings as a whole.
        kw_only: whether all values are keyword-only.
    """

    def made(owner: type[_Section]) -> type[_Section]:
        checked: Any = dataclass(frozen=True, kw_only=kw_only, config=_CONFIG)(owner)
        plain = checked.__init__

        def init(self: Any, *listed: Any, **values: Any) -> None:
            try:
                plain(self, *listed, **values)
            except ValidationError as error:
                raise _input_error(error, name, type(self)) from None

        checked.__init__ = init
        return checked  # type: ignore[no-any-return]

    return made


def descriptions(owner: Any) -> dict[str, str]:
    """Return the descriptions of a section's settings, which are the docstrings of its fields."""
    found: dict[str, str] = {}
    for base in owner.__mro__:  # pydantic reads them only in the class that defines a field
        for name, info in getattr(base, "__pydantic_fields__", {}).items():
            found[name] = found.get(name) or info.description or ""
    return found


def is_default(owner: Any, name: str) -> bool:
    """Return whether a setting of a section has its default."""
    defaults = {item.name: item.default for item in fields(owner)}
    return bool(getattr(owner, name) == defaults[name])


def refuse(key: str, value: object, fix: str) -> InputError:
    """Return the error of a setting that does not fit the others."""
    return InputError(f"{key}={shown(value)} {fix}")


def shown(value: object) -> str:
    """Format a value as it is written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(shown, value))
    if is_dataclass(value):
        return type(value).__name__
    return str(value)


def check_distinct(key: str, values: Iterable[object]) -> None:
    """Check that a list is not empty and has no duplicates.

    Raises:
        InputError: the list is empty or has duplicates; the message names the key and the value.
    """
    listed = list(values)
    if not listed:
        raise InputError(f"{key} is empty: give at least one")
    repeated = sorted({str(value) for value in listed if listed.count(value) > 1})
    if repeated:
        raise InputError(f"{key} names {', '.join(repeated)} more than once: give each one once")


def _input_error(error: ValidationError, name: str, owner: type) -> InputError:
    """Convert pydantic's first error to an `InputError` about the setting's dotted key."""
    first = error.errors()[0]
    kind, context = first["type"], first.get("ctx", {})
    if isinstance(cause := context.get("error"), InputError):
        return cause
    path = [str(part) for part in first["loc"]]
    key = ".".join([*([name] if name else []), *path])
    if kind == "unexpected_keyword_argument":
        return _unknown_setting(key, owner, name)
    if kind in ("missing", "missing_keyword_only_argument"):
        return InputError(f"{key} is required: set it")
    words = _WORDS.get(kind)
    if words is None:
        words = f"cannot be used: {first['msg'][:1].lower()}{first['msg'][1:]}"
    elif kind == "literal_error":
        words = words.format(expected=_choices(context["expected"]))
    else:
        bounds = {name: "2^63" if bound == 2**63 else bound for name, bound in context.items()}
        words = words.format(**bounds)
    value = first["input"]
    is_text = isinstance(value, str) and words.startswith("has the wrong type")
    return InputError(f"{key}={repr(value) if is_text else shown(value)} {words}")


def _choices(expected: str) -> str:
    """Convert pydantic's `'a', 'b' or 'c'` to `a, b, c`."""
    return expected.replace(" or ", ", ").replace("'", "")


def similar_keys(key: str, known: Iterable[str]) -> list[str]:
    """Return the known dotted keys whose last name is like a key's, those of its section first."""
    section, _, name = key.rpartition(".")
    every = list(known)
    own = [one for one in every if section and one.startswith(f"{section}.")]
    for keys in (own, every):
        names = dict.fromkeys(one.rpartition(".")[2] for one in keys)
        near = difflib.get_close_matches(name, names)
        if near:
            return [one for last in near for one in keys if one.rpartition(".")[2] == last]
    return []


def _unknown_setting(key: str, owner: type, name: str) -> InputError:
    """Return the error of an unknown setting."""
    known = [f"{name}.{item.name}" if name else item.name for item in fields(owner)]
    near = similar_keys(key, known)
    advice = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(known)}"
    return InputError(f"{key!r} is not a setting; {advice}")
