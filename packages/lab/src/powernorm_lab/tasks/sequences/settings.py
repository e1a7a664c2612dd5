"""Settings of the task `sequences`."""

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
"""Settings of the model that apply to some architectures only, with these architectures."""


@section("data")
class SeriesDataSettings(BatchedDataSettings):
    """Settings of series and their batches."""

    by_length: bool = False
    """Whether training batches have series of similar length, to reduce padding."""


@section("model")
class SequenceModelSettings(TransformerSettings):
    """Architecture and shape of the network."""

    architecture: SequenceArchitecture = "conformer"
    """`conformer`: a Conformer, which compares the norms of its convolution modules; `patch`: a
    Transformer over patches of frames, as PatchTST; `encoder`: a Transformer over frames."""
    kernel_size: Positive = 7
    """Kernel size of the Conformer's convolutions in frames; odd."""
    patch_length: Positive = 4
    """Number of frames in a patch."""
    mask_padding: bool = True
    """Whether the Conformer's compared norms and its convolutions ignore padding; if they do not,
    as in most code, predictions depend on the padding."""

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
                    f"does not apply to model.architecture={self.architecture}: leave it out, or "
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
