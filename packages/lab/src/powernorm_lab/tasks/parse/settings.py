"""Settings of the parsing task."""

from typing import Annotated, ClassVar

from pydantic import Field

from powernorm_lab.models.choices import Activation, Initialization
from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import BatchedDataSettings
from powernorm_lab.settings.model import ModelSettings
from powernorm_lab.settings.section import FractionBelowOne, Positive, section
from powernorm_lab.settings.training import ClassifierTrainingSettings


@section("data")
class ParsingDataSettings(BatchedDataSettings):
    """Settings of the treebank and the batches of its transitions."""

    vocabulary_size: Annotated[int, Field(ge=4, lt=2**63)] = 2000
    """Number of words, including three marks."""
    max_examples: Positive | None = None
    """Number of evenly spaced training transitions to use; none is all."""


@section("model")
class ParserShape(ModelSettings):
    """The shape of a transition-based parser (Chen and Manning 2014)."""

    num_features: Positive = 128
    """Size of a hidden layer."""
    num_layers: Positive = 2
    """Number of hidden layers."""
    dropout: FractionBelowOne = 0.0
    """Dropout after every hidden layer."""
    activation: Activation = "gelu"
    """Activation of the hidden layers."""
    embedding_features: Positive | None = None
    """Size of embeddings; none is num_features."""
    initialization: Initialization = "xavier"
    """Initialization of linear maps; Xu et al. 2019 recommend `kaiming` for AdaNorm."""

    @property
    def norm_widths(self) -> tuple[int, ...]:
        """Return the number of features of all norms, as a tuple."""
        return (self.num_features,)


@section()
class ParsingSettings(ComparisonSettings):
    """Settings of `powernorm compare parse`."""

    task: ClassVar[str] = "parse"
    measure: ClassVar[str] = "test_uas"
    score: ClassVar[Goal | None] = Goal(metric="valid_uas", direction="max")
    data: ParsingDataSettings = ParsingDataSettings()
    model: ParserShape = ParserShape()
    training: ClassifierTrainingSettings = ClassifierTrainingSettings()
