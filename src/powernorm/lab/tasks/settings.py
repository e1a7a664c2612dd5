"""The settings of every built-in task, by its name, and settings read back from files."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import MappingProxyType
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.overrides import build
from powernorm.lab.tasks.classify.settings import ClassificationSettings
from powernorm.lab.tasks.image.settings import ImageSettings
from powernorm.lab.tasks.lm.settings import LanguageModelSettings
from powernorm.lab.tasks.lm_char.settings import CharacterSettings
from powernorm.lab.tasks.mlm.settings import MaskedLanguageModelSettings
from powernorm.lab.tasks.ner.settings import EntitySettings
from powernorm.lab.tasks.parse.settings import ParsingSettings
from powernorm.lab.tasks.tag.settings import TaggingSettings
from powernorm.lab.tasks.translation.settings import TranslationSettings

SETTINGS: Final[Mapping[str, type[ComparisonSettings]]] = MappingProxyType(
    {
        owner.task: owner
        for owner in (
            LanguageModelSettings,
            MaskedLanguageModelSettings,
            TaggingSettings,
            TranslationSettings,
            ClassificationSettings,
            EntitySettings,
            ParsingSettings,
            ImageSettings,
            CharacterSettings,
        )
    }
)
"""In the order in which the tasks are listed."""

_RENAMED: Final = {
    "tokenised": "tokenized",
    "initialisation": "initialization",
    "length_normalisation": "length_normalization",
}
_ONCE_COMMON: Final[Mapping[str, Mapping[str, Any]]] = {
    "data": {
        "vocabulary_size": 2000,
        "sequence_length": 64,
        "batch_size": 32,
        "evaluation_batch_size": 64,
    },
    "model": {
        "num_features": 128,
        "num_layers": 2,
        "num_heads": 4,
        "feedforward_features": 512,
        "dropout": 0.0,
        "activation": "gelu",
        "placement": "pre",
    },
    "training": {"label_smoothing": 0.0},
}
"""What the files of all tasks had before each had settings of its own: those that meant nothing to
a task, which are at these values there, are left out."""


def settings_of(task: str) -> type[ComparisonSettings]:
    """Return the settings of a task.

    Raises:
        InputError: there is none of that name; lists the known ones.
    """
    if task not in SETTINGS:
        raise InputError(f"there is no task {task!r}: choose one of {', '.join(SETTINGS)}")
    return SETTINGS[task]


def settings_from(values: Mapping[str, Any]) -> ComparisonSettings:
    """Return the settings of nested dictionaries, with the name of their task, as in `to_json`.

    Those of an older version, too; what is left out has its default.

    Raises:
        InputError: a key is unknown or missing, or a value has the wrong type.
    """
    task = values.get("task")
    if not isinstance(task, str):
        raise InputError(f"task={task} has the wrong type: expected a text")
    owner = settings_of(task)
    own = {key: value for key, value in upgraded_settings(values).items() if key != "task"}
    built: ComparisonSettings = build(owner, own)
    return built


def upgraded_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a file as this version writes them, as far as they are a known task's."""
    owner = SETTINGS.get(str(values.get("task")))
    if owner is None:
        return dict(values)
    return {key: _section(owner, str(key), value) for key, value in values.items()}


def upgraded_run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a run as this version writes it: with all settings of its task."""
    owner = SETTINGS.get(str(values.get("task")))
    if owner is None:
        return dict(values)
    filled = upgraded_settings(values)
    for item in fields(owner):
        if item.name != "study" and is_dataclass(item.type):
            defaults = {
                one.name: list(one.default) if isinstance(one.default, tuple) else one.default
                for one in fields(item.type)
                if one.default is not MISSING
            }
            filled[item.name] = {**defaults, **filled.get(item.name, {})}
    return filled


def _section(owner: type[ComparisonSettings], key: str, value: Any) -> Any:
    info = owner.__dataclass_fields__.get(key)
    if info is None or not isinstance(value, Mapping) or key == "norm_options":
        return value
    known = getattr(info.type, "__dataclass_fields__", {})
    once = _ONCE_COMMON.get(key, {})
    renamed = {_RENAMED.get(str(name), str(name)): item for name, item in value.items()}
    return {
        name: item
        for name, item in renamed.items()
        if name in known or name not in once or item != once[name]
    }
