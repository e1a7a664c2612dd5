"""Settings of named-entity recognition."""

from typing import Annotated, ClassVar

from pydantic import Field

from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.model import DetailedTransformerSettings
from powernorm_lab.settings.section import FractionBelowOne, Positive, refuse, section
from powernorm_lab.settings.training import ScoredTrainingSettings
from powernorm_lab.tasks.text_settings import SequenceDataSettings


@section("data")
class EntityDataSettings(SequenceDataSettings):
    """The tagged sentences and how they are cut into batches."""

    vocabulary_size: Annotated[int, Field(ge=3, lt=2**63)] = 2000
    """Number of words, two marks included."""
    max_examples: Positive | None = None
    """Only about so many training sentences, evenly spaced; none is all."""
    vectors: str | None = None
    """Text file of word vectors (GloVe) that the embeddings begin with."""
    bigram_vectors: str | None = None
    """The same of bigrams, two characters written together, where the words are characters."""


@section("model")
class EntityTaggerShape(DetailedTransformerSettings):
    """The shape of a tagger of names (TENER, Yan et al. 2019)."""

    embedding_features: Positive | None = None
    """Size of embeddings where it is not num_features."""
    embedding_dropout: FractionBelowOne | None = None
    """Of the embeddings; none is `dropout`."""
    output_dropout: FractionBelowOne | None = None
    """Before the output; none is none."""
    bigram_features: Positive | None = None
    """Size of the embeddings of bigrams, a character with the one after it, where the words are
    characters; none is none."""
    character_features: Positive | None = None
    """Features made of a word's characters; none is none."""
    character_dropout: FractionBelowOne | None = None
    """Of what is made of a word's characters; none is as of the embeddings."""

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
