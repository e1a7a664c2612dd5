"""Settings of the language modeling task."""

from typing import ClassVar, Literal

from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import SubwordDataSettings
from powernorm_lab.settings.model import TransformerSettings
from powernorm_lab.settings.section import Positive, RisingIds, is_default, refuse, section
from powernorm_lab.settings.training import SmoothedTrainingSettings

LanguageModelArchitecture = Literal["plain", "tensorized"]


@section("model")
class LanguageModelShape(TransformerSettings):
    """The shape of a language model."""

    architecture: LanguageModelArchitecture = "plain"
    """`plain`, or `tensorized`: the attention of Ma et al. (2019)."""
    head_features: Positive | None = None
    """Size of the tensorized attention's head; none is num_features."""
    sees_future: bool = False
    """Whether the tensorized attention has no causal mask, as in its published code."""
    adaptive_cutoffs: RisingIds = ()
    """Ids at which the clusters of an adaptive softmax end; empty is a plain softmax."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.adaptive_cutoffs) != sorted({*self.adaptive_cutoffs}):
            raise refuse("model.adaptive_cutoffs", self.adaptive_cutoffs, "must be increasing")
        if self.architecture == "tensorized":
            self._refuse_inner(
                "the tensorized attention, which has one head", "normformer", "bn-linear", "hybrid"
            )
            if self.num_heads != 1:
                raise refuse(
                    "model.num_heads",
                    self.num_heads,
                    "does not fit the tensorized attention, which has one head: set "
                    "model.num_heads=1, and its size with model.head_features",
                )
            return
        for name in ("head_features", "sees_future"):
            if not is_default(self, name):
                raise refuse(
                    f"model.{name}",
                    getattr(self, name),
                    "does not apply to the plain attention: leave it out, or set "
                    "model.architecture=tensorized",
                )

    def _check_heads(self) -> None:
        if self.head_features is None:
            super()._check_heads()


@section()
class LanguageModelSettings(ComparisonSettings):
    """Settings of `powernorm compare lm`."""

    task: ClassVar[str] = "lm"
    data: SubwordDataSettings = SubwordDataSettings()
    model: LanguageModelShape = LanguageModelShape()
    training: SmoothedTrainingSettings = SmoothedTrainingSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model.adaptive_cutoffs:
            return
        if self.training.label_smoothing:
            raise refuse(
                "training.label_smoothing",
                self.training.label_smoothing,
                "needs the probabilities of the whole vocabulary, which an adaptive softmax does "
                "not compute: set it to 0, or leave model.adaptive_cutoffs out",
            )
        if self.training.strategy == "fsdp2":
            # Gathering a cluster's weights is a collective operation, but not all processes run it.
            raise refuse(
                "training.strategy",
                "fsdp2",
                "does not fit: a process runs only those clusters of an adaptive softmax that have "
                "its targets; use ddp, or leave model.adaptive_cutoffs out",
            )
