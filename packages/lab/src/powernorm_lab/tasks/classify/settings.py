"""Settings of the classification of texts."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.model import DetailedTransformerSettings
from powernorm_lab.settings.section import (
    FractionBelowOne,
    Names,
    Positive,
    is_default,
    refuse,
    section,
)
from powernorm_lab.settings.training import ClassifierTrainingSettings
from powernorm_lab.tasks.text_settings import SequenceDataSettings

Pooling = Literal["mean", "max", "cls"]
"""How one vector is made of a text's positions: their mean, their maximum, or that of a mark in
front."""


@section("data")
class ClassificationDataSettings(SequenceDataSettings):
    """The texts and how they are cut into batches."""

    vocabulary_size: Annotated[int, Field(ge=3, lt=2**63)] = 2000
    """Number of words, two marks included."""
    batch_tokens: Positive | None = None
    """Positions of a micro-batch, in place of a number of texts."""
    max_examples: Positive | None = None
    """Only about so many training texts, evenly spaced; none is all."""

    label_column: str | None = None
    """Of a table of your own with a header, the column with the class; none is `label`."""
    text_columns: Names = ()
    """Of such a table, the columns with the text; none is `sentence` or `text`."""

    def __post_init__(self) -> None:
        if self.batch_tokens is None:
            return
        for name in ("batch_size", "evaluation_batch_size"):
            if not is_default(self, name):
                raise refuse(
                    f"data.{name}",
                    getattr(self, name),
                    f"means nothing where data.batch_tokens={self.batch_tokens} says how large "
                    "batches are: leave it out, or set data.batch_tokens=none",
                )


@section("model")
class ClassifierShape(DetailedTransformerSettings):
    """The shape of an encoder with a head for classes."""

    embedding_features: Positive | None = None
    """Size of embeddings where it is not num_features."""
    embedding_dropout: FractionBelowOne | None = None
    """Of the embeddings; none is `dropout`."""
    output_dropout: FractionBelowOne | None = None
    """Before the output; none is none."""
    pooling: Pooling = "mean"
    """How one vector is made of all positions."""


@section()
class ClassificationSettings(ComparisonSettings):
    """Settings of `powernorm compare classify`."""

    task: ClassVar[str] = "classify"
    measure: ClassVar[str] = "test_accuracy"
    score: ClassVar[Goal | None] = Goal(metric="valid_accuracy", direction="max")
    data: ClassificationDataSettings = ClassificationDataSettings()
    model: ClassifierShape = ClassifierShape()
    training: ClassifierTrainingSettings = ClassifierTrainingSettings()
