"""The built-in tasks by name, imported on demand."""

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, cast

from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.training.task import BuiltinTask

CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lm": "lm.task:LanguageModelTask",
        "translation": "translation.task:TranslationTask",
        "ner": "ner.task:EntityTask",
        "parse": "parse.task:ParsingTask",
        "classify": "classify.task:ClassificationTask",
        "image": "image.task:ImageTask",
        "lm-char": "lm_char.task:CharacterTask",
        "sequences": "sequences.task:SequenceTask",
    }
)
"""Modules below this package, with the task's class in each."""


@cache
def _named_task(name: str) -> BuiltinTask[Any, Any]:
    """Return a task by its name."""
    # Imported on demand: all tasks together need several libraries, most tasks none of these.
    module, _, owner = CLASSES[name].partition(":")
    found = importlib.import_module(f"powernorm_lab.tasks.{module}")
    return cast(BuiltinTask[Any, Any], getattr(found, owner)())


def task_of(config: ComparisonSettings) -> BuiltinTask[Any, Any]:
    """Return the task of a configuration."""
    return _named_task(config.task)
