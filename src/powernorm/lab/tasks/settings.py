"""The settings of every built-in task, by its name, and settings read back from files."""

from collections.abc import Mapping
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

    What is left out has its default.

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
