"""Settings of the task of language modeling over bytes."""

from typing import ClassVar

from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import SequenceDataSettings
from powernorm_lab.settings.model import DetailedTransformerSettings
from powernorm_lab.settings.section import NotNegative, section
from powernorm_lab.settings.training import SmoothedTrainingSettings


@section("model")
class TransformerXLShape(DetailedTransformerSettings):
    """The shape of a Transformer-XL."""

    memory_length: NotNegative | None = None
    """Number of positions before a segment that are attended to in training; none is the length of
    a segment."""
    evaluation_memory_length: NotNegative | None = None
    """The same number in evaluation; none is as in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_inner(
            "the attention to a memory, which would be normalized twice", "bn-linear", "hybrid"
        )


@section()
class CharacterSettings(ComparisonSettings):
    """Settings of `powernorm compare lm-char`."""

    task: ClassVar[str] = "lm-char"
    measure: ClassVar[str] = "test_bits_per_character"
    score: ClassVar[Goal | None] = Goal(metric="valid_bits_per_character", direction="min")
    data: SequenceDataSettings = SequenceDataSettings()
    model: TransformerXLShape = TransformerXLShape()
    training: SmoothedTrainingSettings = SmoothedTrainingSettings()
