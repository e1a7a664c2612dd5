"""Settings of the task of text classification."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import SequenceDataSettings
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

Pooling = Literal["mean", "max", "cls"]
"""Pooling of positions: their mean, their maximum, or the output at a prepended position."""


@section("data")
class ClassificationDataSettings(SequenceDataSettings):
    """Settings of texts and their batches."""

    vocabulary_size: Annotated[int, Field(ge=3, lt=2**63)] = 2000
    """Number of words, including two marks."""
    batch_tokens: Positive | None = None
    """Number of positions of a micro-batch, in place of a number of texts."""
    max_examples: Positive | None = None
    """Number of evenly spaced training texts to use; none is all."""

    label_column: str | None = None
    """Column with the class, in your own table with a header; none is `label`."""
    text_columns: Names = ()
    """Columns with the text, in such a table; none is `sentence` or `text`."""

    def __post_init__(self) -> None:
        if self.batch_tokens is None:
            return
        for name in ("batch_size", "evaluation_batch_size"):
            if not is_default(self, name):
                raise refuse(
                    f"data.{name}",
                    getattr(self, name),
                    f"does not apply with data.batch_tokens={self.batch_tokens}, which is the size "
                    "of batches: leave it out, or set data.batch_tokens=none",
                )


@section("model")
class ClassifierShape(DetailedTransformerSettings):
    """The shape of an encoder with a head for classes."""

    embedding_features: Positive | None = None
    """Size of embeddings; none is num_features."""
    embedding_dropout: FractionBelowOne | None = None
    """Dropout of the embeddings; none is `dropout`."""
    output_dropout: FractionBelowOne | None = None
    """Dropout before the output; none is no dropout."""
    pooling: Pooling = "mean"
    """Pooling of all positions into one vector."""


@section()
class ClassificationSettings(ComparisonSettings):
    """Settings of `powernorm compare classify`."""

    task: ClassVar[str] = "classify"
    measure: ClassVar[str] = "test_accuracy"
    score: ClassVar[Goal | None] = Goal(metric="valid_accuracy", direction="max")
    data: ClassificationDataSettings = ClassificationDataSettings()
    model: ClassifierShape = ClassifierShape()
    training: ClassifierTrainingSettings = ClassifierTrainingSettings()
