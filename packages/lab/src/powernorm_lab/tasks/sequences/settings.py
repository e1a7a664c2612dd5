"""Settings of the classification of series of variable length."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import BatchedDataSettings
from powernorm_lab.settings.model import TransformerSettings
from powernorm_lab.settings.section import Positive, is_default, refuse, section
from powernorm_lab.settings.training import ClassifierTrainingSettings

SequenceArchitecture = Literal["conformer", "patch", "encoder"]
_TRANSFORMER = ("encoder", "patch")
_MEANT_FOR: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(("kernel_size", "mask_padding"), ("conformer",)),
        "patch_length": ("patch",),
        **dict.fromkeys(
            ("activation", "placement", "embedding_norm", "qk_norm", "num_norm_layers"),
            _TRANSFORMER,
        ),
    }
)
"""Settings of the model that not every architecture has a place for."""


@section("data")
class SeriesDataSettings(BatchedDataSettings):
    """The series and how they are cut into batches."""

    by_length: bool = False
    """Whether series of like length make a training batch, so that little is padded."""


@section("model")
class SequenceModelSettings(TransformerSettings):
    """Which network, and its shape."""

    architecture: SequenceArchitecture = "conformer"
    """A Conformer, whose norm that is compared is the one of the convolution modules; a
    Transformer over patches of frames, as PatchTST; or a Transformer over frames."""
    kernel_size: Positive = 7
    """Frames that a convolution of the Conformer sees; odd."""
    patch_length: Positive = 4
    """Frames in a patch."""
    mask_padding: bool = True
    """Whether the Conformer's norms that are compared and its convolutions leave out padding; where
    they do not, as in most code, answers depend on what a series is padded to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise refuse(
                "model.kernel_size", self.kernel_size, "has no middle frame: give an odd number"
            )
        for name, architectures in _MEANT_FOR.items():
            if self.architecture not in architectures and not is_default(self, name):
                raise refuse(
                    f"model.{name}",
                    getattr(self, name),
                    f"means nothing to model.architecture={self.architecture}: leave it out, or "
                    f"choose {' or '.join(architectures)}",
                )


@section()
class SequenceSettings(ComparisonSettings):
    """Settings of `powernorm compare sequences`."""

    task: ClassVar[str] = "sequences"
    measure: ClassVar[str] = "test_accuracy"
    score: ClassVar[Goal | None] = Goal(metric="valid_accuracy", direction="max")
    data: SeriesDataSettings = SeriesDataSettings()
    model: SequenceModelSettings = SequenceModelSettings()
    training: ClassifierTrainingSettings = ClassifierTrainingSettings()
