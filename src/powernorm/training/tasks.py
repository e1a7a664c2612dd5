"""The tasks by the name that `ComparisonConfig.task` has."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.training.characters import CharacterTask
from powernorm.training.classification import ClassificationTask
from powernorm.training.config import ComparisonConfig
from powernorm.training.entities import EntityTask
from powernorm.training.images import ImageTask
from powernorm.training.language_tasks import (
    LanguageModelTask,
    MaskedLanguageModelTask,
    TaggingTask,
)
from powernorm.training.parsing import ParsingTask
from powernorm.training.task import Task
from powernorm.training.translation import TranslationTask

TASKS: Final[Mapping[str, Task[Any]]] = MappingProxyType(
    {
        "lm": LanguageModelTask(),
        "mlm": MaskedLanguageModelTask(),
        "tag": TaggingTask(),
        "translation": TranslationTask(),
        "ner": EntityTask(),
        "parse": ParsingTask(),
        "classify": ClassificationTask(),
        "image": ImageTask(),
        "lm-char": CharacterTask(),
    }
)


def task_of(config: ComparisonConfig) -> Task[Any]:
    """Return the task of a configuration.

    Raises:
        InputError: there is none of that name.
    """
    if config.task not in TASKS:
        raise InputError(f"There is no task {config.task!r}: choose one of {', '.join(TASKS)}.")
    return TASKS[config.task]
