"""The built-in tasks and their settings by name, imported on demand."""

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from powernorm.errors import InputError
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import build

if TYPE_CHECKING:
    from powernorm_lab.training.task import BuiltinTask  # not imported: settings need no torch

CLASSES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "lm": ("LanguageModelSettings", "LanguageModelTask"),
        "translation": ("TranslationSettings", "TranslationTask"),
        "classify": ("ClassificationSettings", "ClassificationTask"),
        "ner": ("EntitySettings", "EntityTask"),
        "parse": ("ParsingSettings", "ParsingTask"),
        "image": ("ImageSettings", "ImageTask"),
        "lm-char": ("CharacterSettings", "CharacterTask"),
        "sequences": ("SequenceSettings", "SequenceTask"),
    }
)
"""Classes in `settings` and `task` of each task's folder, in the order of lists."""


def settings_of(task: str) -> type[ComparisonSettings]:
    """Return the settings of a task.

    Raises:
        InputError: the task is unknown; the message lists the known ones.
    """
    if task not in CLASSES:
        raise InputError(f"there is no task {task!r}: choose one of {', '.join(CLASSES)}")
    return cast(type[ComparisonSettings], _found(task, "settings", CLASSES[task][0]))


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


def task_of(config: ComparisonSettings) -> "BuiltinTask[Any, Any]":
    """Return the task of a configuration."""
    return _named_task(config.task)


@cache
def _named_task(name: str) -> "BuiltinTask[Any, Any]":
    # Imported on demand: all tasks together need several libraries, most tasks none of these.
    return cast("BuiltinTask[Any, Any]", _found(name, "task", CLASSES[name][1])())


def _found(task: str, module: str, name: str) -> Any:
    folder = task.replace("-", "_")
    return getattr(importlib.import_module(f"powernorm_lab.tasks.{folder}.{module}"), name)
