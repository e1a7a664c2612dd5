"""The tasks by the names that their settings have."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.tasks.classify.task import ClassificationTask
from powernorm.lab.tasks.image.task import ImageTask
from powernorm.lab.tasks.lm.task import LanguageModelTask
from powernorm.lab.tasks.lm_char.task import CharacterTask
from powernorm.lab.tasks.mlm.task import MaskedLanguageModelTask
from powernorm.lab.tasks.ner.task import EntityTask
from powernorm.lab.tasks.parse.task import ParsingTask
from powernorm.lab.tasks.tag.task import TaggingTask
from powernorm.lab.tasks.translation.task import TranslationTask
from powernorm.lab.training.task import Task

TASKS: Final[Mapping[str, Task[Any, Any]]] = MappingProxyType(
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


def task_of(config: ComparisonSettings) -> Task[Any, Any]:
    """Return the task of settings."""
    return TASKS[config.task]
