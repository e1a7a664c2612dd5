"""Settings of the built-in tasks by name, and settings from files."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, cast

from powernorm.errors import InputError
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import build

CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lm": "LanguageModelSettings",
        "translation": "TranslationSettings",
        "classify": "ClassificationSettings",
        "ner": "EntitySettings",
        "parse": "ParsingSettings",
        "image": "ImageSettings",
        "lm-char": "CharacterSettings",
        "sequences": "SequenceSettings",
    }
)
"""Classes of settings by task, in the order of lists; imported on demand."""


def settings_of(task: str) -> type[ComparisonSettings]:
    """Return the settings of a task.

    Raises:
        InputError: the task is unknown; the message lists the known ones.
    """
    if task not in CLASSES:
        raise InputError(f"there is no task {task!r}: choose one of {', '.join(CLASSES)}")
    module = importlib.import_module(f"powernorm_lab.tasks.{task.replace('-', '_')}.settings")
    return cast(type[ComparisonSettings], getattr(module, CLASSES[task]))


def settings_from(values: Mapping[str, Any]) -> ComparisonSettings:
    """Return settings from nested dictionaries with the name of the task, as in `to_json`.

    Missing settings have their defaults.

    Raises:
        InputError: a key is unknown or missing, or a value has the wrong type.
    """
    task = values.get("task")
    if not isinstance(task, str):
        raise InputError(f"task={task} has the wrong type: expected a text")
    owner = settings_of(task)
    own = {key: value for key, value in values.items() if key != "task"}
    built: ComparisonSettings = build(owner, own)
    return built
