"""Settings of the classification of images."""

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
    """The images and how they are cut into batches."""

    max_examples: Positive | None = None
    """Only about so many training images, evenly spaced; none is all."""
    augmentation: bool = False
    """Whether training images are shifted and mirrored at random."""


@section("model")
class ImageModelSettings(ModelSettings):
    """Which network."""

    architecture: ImageArchitecture = "convnet"
    """The convolutional network of Xu et al. 2019, or a residual one."""


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
                "is for the weights of linear maps, and these networks have convolutions: choose "
                "another",
            )
