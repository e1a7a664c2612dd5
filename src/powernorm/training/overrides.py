"""Setting fields of a configuration by dotted keys, as `--set section.key=value` does."""

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from powernorm.errors import InputError
from powernorm.json_reading import parse_json
from powernorm.training.config import ComparisonConfig, OptionValue
from powernorm.training.config_fields import is_later

NONE_WORDS: Final = ("none", "null")
BOOLEAN_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False}
FREE_SECTION: Final = "norm_options"
FIXED_KEYS: Final = ("task", "preset", "study", "variants")
"""Chosen by the recipe; changing them would only mislabel the results."""
MAX_WHOLE: Final = 2**63 - 1
"""No setting is larger."""


def override(config: ComparisonConfig, assignments: Iterable[str]) -> ComparisonConfig:
    """Return the configuration with every `key=value` applied, and checked when all are.

    So it does not matter in which order settings come that have to fit each other. Of a key that
    comes twice the last value counts.

    Keys: `section.key` (`optimizer.learning_rate=1e-3`), `norms=ln,bn`, `seeds=0,1` and
    `norm_options.NORM.OPTION` (`norm_options.rbn.mean_penalty=10`), whose value is read as a JSON
    scalar and checked when the norm is built.

    Raises:
        InputError: an assignment has no `=`, its key is unknown, its value has the wrong type, or
            the settings do not fit each other.
    """
    changes = _Changes({}, {}, {name: dict(chosen) for name, chosen in config.norm_options.items()})
    for assignment in assignments:
        _assign(changes, *_key_and_text(assignment, "training.max_steps=500"))
    sections = {
        name: replace(getattr(config, name), **changed)
        for name, changed in changes.sections.items()
    }
    return replace(config, **changes.plain, **sections, norm_options=changes.norm_options)


def known_keys() -> list[str]:
    """Return every dotted key that `override` takes, in the configuration's order."""
    keys = []
    for name, hint in _hints(ComparisonConfig).items():
        if is_dataclass(hint):
            keys += [f"{name}.{item.name}" for item in fields(hint)]
        elif name == FREE_SECTION:
            keys.append(f"{name}.NORM.OPTION")
        elif name not in FIXED_KEYS:
            keys.append(name)
    return keys


def from_json(values: Mapping[str, Any]) -> ComparisonConfig:
    """Return the configuration that `to_json` wrote.

    Raises:
        InputError: a key is unknown or missing, or a value has the wrong type.
    """
    built: ComparisonConfig = _build(ComparisonConfig, values, "")
    return built


@dataclass(frozen=True, slots=True)
class _Changes:
    """What assignments ask for, parsed but not checked against each other."""

    plain: dict[str, Any]
    """By key, of settings that are in no section."""
    sections: dict[str, dict[str, Any]]
    norm_options: dict[str, dict[str, OptionValue]]
    """All of them, the configuration's too."""


def _assign(changes: _Changes, key: str, text: str) -> None:
    if key.split(".")[0] == FREE_SECTION:
        _assign_option(changes, key, text)
        return
    if key not in known_keys():
        raise _unknown_key(key)
    section, _, name = key.rpartition(".")
    hints = _hints(ComparisonConfig)
    if section:
        hints = _hints(hints[section])
    changed = changes.sections.setdefault(section, {}) if section else changes.plain
    changed[name] = _parse(text, hints[name], key)


def _assign_option(changes: _Changes, key: str, text: str) -> None:
    norm, option = _norm_and_option(key)
    changes.norm_options.setdefault(norm, {})[option] = _scalar(text)


def _norm_and_option(key: str) -> tuple[str, str]:
    # The norm may have dots itself, as my.module:MyNorm; the option has none.
    norm, _, option = key.removeprefix(f"{FREE_SECTION}.").rpartition(".")
    if not (norm and option.isidentifier()):
        raise InputError(
            f"{key!r} does not name an option of a norm: write {FREE_SECTION}.NORM.OPTION=value, "
            f"e.g. {FREE_SECTION}.pn.warmup_steps=100."
        )
    return norm, option


def split_settings(
    assignments: Iterable[str],
) -> tuple[dict[str, str], dict[str, dict[str, OptionValue]]]:
    """Return settings, each a text, and options by norm, of assignments `key=value`.

    Raises:
        InputError: an assignment has no `=`, or does not name an option of a norm.
    """
    settings: dict[str, str] = {}
    options: dict[str, dict[str, OptionValue]] = {}
    for assignment in assignments:
        key, text = _key_and_text(assignment, "steps=500")
        if key.split(".")[0] == FREE_SECTION:
            norm, option = _norm_and_option(key)
            options.setdefault(norm, {})[option] = _scalar(text)
        else:
            settings[key] = text
    return settings, options


def parse_options(assignments: Iterable[str]) -> dict[str, OptionValue]:
    """Return options of a norm, each written as `key=value`.

    Raises:
        InputError: one without a `=`.
    """
    options = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise InputError(f"{assignment!r} is no option: write key=value, e.g. eps=1e-5.")
        options[key] = _scalar(text)
    return options


def _key_and_text(assignment: str, example: str) -> tuple[str, str]:
    key, equals, text = (part.strip() for part in assignment.partition("="))
    if not key or not equals:
        raise InputError(f"{assignment!r} is not of the form key=value, e.g. {example}.")
    return key, text


def _scalar(text: str) -> OptionValue:
    lowered = text.lower()
    if lowered in NONE_WORDS:
        return None
    if lowered in BOOLEAN_WORDS:
        return BOOLEAN_WORDS[lowered]
    try:
        value = parse_json(text, text, "")
    except InputError:
        return text
    # A float that is not finite has no place in the JSON files of the runs: leave it a text, which
    # no norm takes for a number.
    is_usable = isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_usable else text


def _unknown_key(key: str) -> InputError:
    keys = known_keys()
    section = [known for known in keys if known.startswith(f"{key.split('.')[0]}.")]
    near = difflib.get_close_matches(key, keys, n=3, cutoff=0.6)
    # A bare "learning_rate" is far from "optimizer.learning_rate" as a string.
    near += [known for known in keys if known.split(".")[-1] == key.split(".")[-1]]
    if near:
        offered = ", ".join(dict.fromkeys(near))
        return InputError(f"{key!r} is not a setting; did you mean {offered}?")
    return InputError(f"{key!r} is not a setting; known are {', '.join(section or keys)}.")


def _hints(owner: Any) -> dict[str, Any]:
    return get_type_hints(owner)


def _parse(text: str, hint: Any, key: str) -> Any:
    """Read `text` as the type `hint` of a configuration field."""
    if _is_optional(hint):
        if text.lower() in NONE_WORDS:
            return None
        hint = _without_none(hint)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        # Of texts "none" may be one: a norm is called so.
        is_none = item is not str and text.lower() in NONE_WORDS
        text = "" if is_none else text.removeprefix("(").removesuffix(")")
        return tuple(_parse(part.strip(), item, key) for part in text.split(",") if part.strip())
    if hint is str:
        return text
    if get_origin(hint) is Literal:
        return _checked(text, hint, key)
    if hint is bool:
        return _checked(BOOLEAN_WORDS.get(text.lower()), hint, key, shown=text)
    try:
        return _checked(hint(text), hint, key)
    except ValueError:
        raise _wrong_type(key, text, hint) from None


def _build(owner: Any, values: Mapping[str, Any], prefix: str) -> Any:
    hints = _hints(owner)
    needed = {item.name for item in fields(owner) if not is_later(item)}
    unknown = sorted(set(values) - set(hints))
    missing = sorted(needed - set(values))
    if unknown or missing:
        what = f"has unknown {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"
        raise InputError(
            f"The saved configuration {prefix.rstrip('.')}{' ' if prefix else ''}{what}: "
            "it was written by another version of powernorm."
        )
    return owner(
        **{
            name: _restored(values[name], hint, prefix + name)
            for name, hint in hints.items()
            if name in values
        }
    )


def _restored(value: Any, hint: Any, key: str) -> Any:
    if _is_optional(hint) and is_dataclass(_without_none(hint)):
        return None if value is None else _restored(value, _without_none(hint), key)
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _wrong_type(key, value, dict)
        return _build(hint, value, f"{key}.")
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(
            _restored(item, get_args(hint)[0], f"{key}.{index}")
            if is_dataclass(get_args(hint)[0])
            else _checked(item, get_args(hint)[0], key)
            for index, item in enumerate(value)
        )
    if get_origin(hint) is Mapping and key != FREE_SECTION:
        return _restored_mapping(value, get_args(hint)[1], key)
    if key == FREE_SECTION:
        if not (isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values())):
            raise _wrong_type(key, value, dict)
        return {name: dict(chosen) for name, chosen in value.items()}
    return _checked(value, hint, key)


def _restored_mapping(value: Any, hint: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(key, value, dict)
    if hint is str:
        return {name: _checked(item, str, f"{key}.{name}") for name, item in value.items()}
    return dict(value)


def _checked(value: Any, hint: Any, key: str, *, shown: Any = None) -> Any:
    if _is_optional(hint):
        if value is None:
            return None
        hint = _without_none(hint)
    if get_origin(hint) is Literal:
        accepted = value in get_args(hint)
    elif isinstance(value, int) and abs(value) > MAX_WHOLE:
        accepted = False
    elif hint is float:
        accepted = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if accepted else value
    elif get_origin(hint) is not None:
        accepted = False
    else:
        accepted = type(value) is hint
    if not accepted:
        raise _wrong_type(key, value if shown is None else shown, hint)
    return value


def _wrong_type(key: str, value: Any, hint: Any) -> InputError:
    what = "is not known" if get_origin(hint) is Literal else "has the wrong type"
    return InputError(f"{key}={value} {what}: expected {_describe(hint)}.")


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    words = {
        int: "a whole number below 2^63",
        float: "a number",
        bool: "true or false",
        str: "a text",
    }
    return words.get(hint, "a section of settings")


def _is_optional(hint: Any) -> bool:
    is_union = get_origin(hint) in (Union, types.UnionType)
    return is_union and type(None) in get_args(hint)


def _without_none(hint: Any) -> Any:
    (kept,) = [item for item in get_args(hint) if item is not type(None)]
    return kept
