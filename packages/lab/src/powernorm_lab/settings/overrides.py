"""Build settings, and change them by dotted keys, as `--set section.key=value` does."""

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from powernorm.errors import InputError
from powernorm.option_values import NONE_WORDS, OptionValue, option_value, toml_value
from powernorm_lab.settings.section import descriptions, shown, similar_keys

FREE_SECTION: Final = "norm_options"
FIXED_KEYS: Final = ("preset", "study", "variants")
"""Settings that only a recipe sets; changing them would mislabel the results."""

Settings = TypeVar("Settings")


def override(config: Settings, assignments: Iterable[str]) -> Settings:
    """Return settings with all assignments `key=value` applied, and then checked together.

    The order of settings that have to fit each other does not matter. The last value of a repeated
    key counts. Values are parsed as TOML unless the setting is a string.

    Keys: `section.key` (`optimizer.learning_rate=1e-3`), `norms=ln,bn`, `seeds=0,1` and
    `norm_options.NORM.OPTION` (`norm_options.rbn.mean_penalty=10`), whose value is checked when the
    norm is built.

    Raises:
        InputError: an assignment has no `=`, its key is unknown, its value has the wrong type, or
            the settings do not fit each other.
    """
    options: Mapping[str, Any] = getattr(config, FREE_SECTION, {})
    changes = _Changes({}, {}, {name: dict(chosen) for name, chosen in options.items()})
    for assignment in assignments:
        _assign(type(config), changes, *_key_and_text(assignment, "training.max_steps=500"))
    sections = {
        name: replace(getattr(config, name), **changed)
        for name, changed in changes.sections.items()
    }
    whole: Any = config
    free = {FREE_SECTION: changes.norm_options} if hasattr(config, FREE_SECTION) else {}
    changed_whole: Settings = replace(whole, **changes.plain, **sections, **free)
    return changed_whole


def known_keys(owner: Any) -> list[str]:
    """Return every dotted key that `override` takes, in the settings' order."""
    keys, hints = [], get_type_hints(owner)
    for item in fields(owner):
        if item.name == FREE_SECTION:
            keys.append(f"{item.name}.NORM.OPTION")
        elif is_dataclass(hints[item.name]):
            keys += [f"{item.name}.{one.name}" for one in fields(hints[item.name])]
        elif item.name not in FIXED_KEYS:
            keys.append(item.name)
    return keys


def explained(owner: Any) -> list[tuple[str, str]]:
    """Return every dotted key with its description and default, for the help of a command."""
    hints, rows = get_type_hints(owner), []
    for key in known_keys(owner):
        section, _, name = key.rpartition(".")
        of = hints.get(section, owner)
        if key.startswith(FREE_SECTION):
            rows.append((key, "Option of build_norm, see `powernorm norms`."))
            continue
        default = of.__dataclass_fields__[name].default
        said = "needed" if default is MISSING else f"default {shown(default) or 'none'}"
        text = " ".join(descriptions(of)[name].split())
        rows.append((key, f"{text} [{said}]"))
    return rows


def build(owner: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Build a section, or all settings, from nested dictionaries as read from JSON or TOML.

    Raises:
        InputError: a key is unknown or missing, or a value cannot be used.
    """
    if not isinstance(values, Mapping):
        raise InputError(
            f"{prefix.rstrip('.')}={shown(values)} has the wrong type: expected a section of "
            "settings"
        )
    hints = get_type_hints(owner)
    # An absent section is built from nothing, so that the error names the setting that it needs.
    needed: dict[str, Any] = {
        item.name: {}
        for item in fields(owner)
        if item.default is MISSING and item.default_factory is MISSING
        if is_dataclass(hints[item.name])
    }
    given = {**needed, **values}
    return owner(
        **{name: _built(value, hints.get(name), prefix + name) for name, value in given.items()}
    )


def _built(value: Any, hint: Any, key: str) -> Any:
    if _is_optional(hint):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        hint = _without_none(hint)
    if is_dataclass(hint):
        return build(hint, value, f"{key}.")
    if get_origin(hint) is tuple and isinstance(value, list) and is_dataclass(get_args(hint)[0]):
        return tuple(
            build(get_args(hint)[0], item, f"{key}.{index}.") for index, item in enumerate(value)
        )
    return value


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes that assignments make, parsed but not checked."""

    plain: dict[str, Any]
    """Values by key of settings outside of sections."""
    sections: dict[str, dict[str, Any]]
    norm_options: dict[str, dict[str, OptionValue]]
    """Options by norm, including those of the settings before the changes."""


def _assign(owner: Any, changes: _Changes, key: str, text: str) -> None:
    if key.split(".")[0] == FREE_SECTION and hasattr(owner, "norms"):
        norm, option = _norm_and_option(key)
        changes.norm_options.setdefault(norm, {})[option] = option_value(text)
        return
    if key not in known_keys(owner):
        raise _unknown_key(owner, key)
    section, _, name = key.rpartition(".")
    hints = get_type_hints(owner)
    if section:
        hints = get_type_hints(hints[section])
    changed = changes.sections.setdefault(section, {}) if section else changes.plain
    changed[name] = _parse(text, hints[name])


def _norm_and_option(key: str) -> tuple[str, str]:
    # A norm such as my.module:MyNorm contains dots; an option contains none.
    norm, _, option = key.removeprefix(f"{FREE_SECTION}.").rpartition(".")
    if not (norm and option.isidentifier()):
        raise InputError(
            f"{key!r} does not name an option of a norm: write {FREE_SECTION}.NORM.OPTION=value, "
            f"e.g. {FREE_SECTION}.pn.warmup_steps=100"
        )
    return norm, option


def split_settings(
    assignments: Iterable[str],
) -> tuple[dict[str, str], dict[str, dict[str, OptionValue]]]:
    """Split assignments `key=value` into settings as strings, and options by norm.

    Raises:
        InputError: an assignment has no `=`, or does not name an option of a norm.
    """
    settings: dict[str, str] = {}
    options: dict[str, dict[str, OptionValue]] = {}
    for assignment in assignments:
        key, text = _key_and_text(assignment, "steps=500")
        if key.split(".")[0] == FREE_SECTION:
            norm, option = _norm_and_option(key)
            options.setdefault(norm, {})[option] = option_value(text)
        else:
            settings[key] = text
    return settings, options


def _key_and_text(assignment: str, example: str) -> tuple[str, str]:
    key, equals, text = (part.strip() for part in assignment.partition("="))
    if not key or not equals:
        raise InputError(f"{assignment!r} is not of the form key=value, e.g. {example}")
    return key, text


def _unknown_key(owner: Any, key: str) -> InputError:
    keys = known_keys(owner)
    section = [known for known in keys if known.startswith(f"{key.split('.')[0]}.")]
    near = similar_keys(key, keys)
    if near:
        advice = f"did you mean {', '.join(near)}?"
    elif section:
        advice = f"known are {', '.join(section)}"
    else:
        plain = [known for known in keys if "." not in known]
        sections = dict.fromkeys(known.split(".")[0] for known in keys if "." in known)
        known = ", ".join(plain + [f"{name}.…" for name in sections])
        advice = f"known are {known}: name one of a section to see all that it has"
    return InputError(f"{key!r} is not a setting of the task {owner.task}; {advice}")


def _parse(text: str, hint: Any) -> Any:
    """Convert a string to a setting's type as far as possible; the section checks the value."""
    if _is_optional(hint):
        if text.lower() in NONE_WORDS:
            return None
        hint = _without_none(hint)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        # In a list of strings, "none" is an item: it is the short name of a norm.
        is_none = item is not str and text.lower() in NONE_WORDS
        inside = "" if is_none else text.strip("()[]")
        return tuple(_parse(part.strip(), item) for part in inside.split(",") if part.strip())
    is_text = hint is str or get_origin(hint) is Literal
    value = toml_value(text.lower() if hint is bool else text)
    return value if not is_text or isinstance(value, str) else text


def _is_optional(hint: Any) -> bool:
    is_union = get_origin(hint) in (Union, types.UnionType)
    return is_union and type(None) in get_args(hint)


def _without_none(hint: Any) -> Any:
    kept = [item for item in get_args(hint) if item is not type(None)]
    return kept[0] if len(kept) == 1 else hint
