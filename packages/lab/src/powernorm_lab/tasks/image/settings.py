"""Settings of the task of image classification."""

from typing import ClassVar, Literal

from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.data import BatchedDataSettings
from powernorm_lab.settings.model import ModelSettings
from powernorm_lab.settings.section import Positive, refuse, section
from powernorm_lab.settings.training import ClassifierTrainingSettings

ImageArchitecture = Literal["convnet", "resnet20", "resnet18"]


@section("data")
class ImageDataSettings(BatchedDataSettings):
    """Settings of images and their batches."""

    max_examples: Positive | None = None
    """Number of evenly spaced training images to use; none is all."""
    augmentation: bool = False
    """Whether training images are shifted and mirrored at random."""


@section("model")
class ImageModelSettings(ModelSettings):
    """Architecture of the network."""

    architecture: ImageArchitecture = "convnet"
    """The convolutional network of Xu et al. 2019, or a residual network."""


@section()
class ImageSettings(ComparisonSettings):
    """Settings of `powernorm compare image`."""

    task: ClassVar[str] = "image"
    measure: ClassVar[str] = "test_accuracy"
    score: ClassVar[Goal | None] = Goal(metric="valid_accuracy", direction="max")
    data: ImageDataSettings = ImageDataSettings()
    model: ImageModelSettings = ImageModelSettings()
    training: ClassifierTrainingSettings = ClassifierTrainingSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer.name == "muon":
            raise refuse(
                "optimizer.name",
                "muon",
                "is for the weights of linear layers, and these networks have convolutions: choose "
                "another",
            )
