"""Settings of the task of named-entity recognition."""

from typing import Annotated, ClassVar

from pydantic import Field

from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import SequenceDataSettings
from powernorm_lab.settings.model import DetailedTransformerSettings
from powernorm_lab.settings.section import FractionBelowOne, Positive, refuse, section
from powernorm_lab.settings.training import ScoredTrainingSettings


@section("data")
class EntityDataSettings(SequenceDataSettings):
    """Settings of tagged sentences and their batches."""

    vocabulary_size: Annotated[int, Field(ge=3, lt=2**63)] = 2000
    """Number of words, including two marks."""
    max_examples: Positive | None = None
    """Number of evenly spaced training sentences to use; none is all."""
    vectors: str | None = None
    """Text file of word vectors (GloVe) that initialize the embeddings."""
    bigram_vectors: str | None = None
    """Text file of vectors of bigrams, if the words are characters."""


@section("model")
class EntityTaggerShape(DetailedTransformerSettings):
    """The shape of an entity tagger (TENER, Yan et al. 2019)."""

    embedding_features: Positive | None = None
    """Size of embeddings; none is num_features."""
    embedding_dropout: FractionBelowOne | None = None
    """Dropout of the embeddings; none is `dropout`."""
    output_dropout: FractionBelowOne | None = None
    """Dropout before the output; none is no dropout."""
    bigram_features: Positive | None = None
    """Size of the embeddings of bigrams (a character with the next one), if the words are
    characters; none uses no bigrams."""
    character_features: Positive | None = None
    """Number of features from a word's characters; none uses no characters."""
    character_dropout: FractionBelowOne | None = None
    """Dropout of the characters' embeddings; none is `embedding_dropout`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_inner(
            "the directional attention, whose keys are its input", "bn-linear", "hybrid"
        )


@section()
class EntitySettings(ComparisonSettings):
    """Settings of `powernorm compare ner`."""

    task: ClassVar[str] = "ner"
    measure: ClassVar[str] = "test_f1"
    score: ClassVar[Goal | None] = Goal(metric="valid_f1", direction="max")
    data: EntityDataSettings = EntityDataSettings()
    model: EntityTaggerShape = EntityTaggerShape()
    training: ScoredTrainingSettings = ScoredTrainingSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.bigram_vectors is not None and self.model.bigram_features is None:
            raise refuse(
                "data.bigram_vectors",
                self.data.bigram_vectors,
                "has vectors of bigrams, but the model has none: set model.bigram_features to the "
                "size of the vectors",
            )
