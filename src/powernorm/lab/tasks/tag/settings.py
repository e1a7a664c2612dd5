"""Settings of part-of-speech tagging."""

from typing import Annotated, ClassVar

from pydantic import Field

from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.model import TransformerSettings
from powernorm.lab.settings.section import section
from powernorm.lab.settings.training import ClassifierTrainingSettings, SelectedBy
from powernorm.lab.tasks.text_settings import SequenceDataSettings
from powernorm.runs import Goal


@section("data")
class TaggingDataSettings(SequenceDataSettings):
    """A treebank over its words."""

    vocabulary_size: Annotated[int, Field(ge=3, lt=2**63)] = 2000
    """Number of words, two marks included."""


@section("training")
class TaggingTrainingSettings(ClassifierTrainingSettings):
    """The length of the run, and what is watched and scored during it."""

    select_by: SelectedBy = "loss"


@section()
class TaggingSettings(ComparisonSettings):
    """Settings of `powernorm compare tag`."""

    task: ClassVar[str] = "tag"
    score: ClassVar[Goal | None] = Goal(metric="valid_accuracy", direction="max")
    data: TaggingDataSettings = TaggingDataSettings()
    model: TransformerSettings = TransformerSettings()
    training: TaggingTrainingSettings = TaggingTrainingSettings()
