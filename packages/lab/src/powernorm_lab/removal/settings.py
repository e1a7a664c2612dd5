"""Settings of a removal: method, losses, data, optimizer and length of the training."""

from typing import ClassVar, Final, Literal

from powernorm.surgery.removal import MethodName
from powernorm_lab.settings.section import (
    Fraction,
    FractionBelowOne,
    NotNegative,
    NotNegativeNumber,
    Positive,
    PositiveNumber,
    refuse,
    section,
)
from powernorm_lab.settings.training import OptimizerSettings, ScheduleSettings

DistillationName = Literal["auto", "logits", "hidden", "none"]

DEFAULT_STEPS: Final = 300
"""Updates if the length of the original's training is not known."""
DEFAULT_RATE: Final = 3e-4
"""Learning rate if the original's is not known."""
RATE_SHARE: Final = 0.5
"""Default fraction of the original's learning rate; a quarter was worse on the demo model, see
docs."""
DEFAULT_SHARE: Final = 0.1
"""Updates as a fraction of the original's, if those are known."""
LONG_SHARE: Final = 0.1
"""Fraction of the original's updates from which the task's loss helps distillation: see
docs/removal.md."""
LONG_DISTILLATION: Final = 0.5
"""Weight of the distillation in removals of at least `LONG_SHARE`."""


@section("method")
class MethodSettings:
    """Replacement of a norm, and its schedule."""

    name: MethodName = "match"
    """`match`: an affine map per feature, fitted to the norm by least squares; `match-centered`:
    the same after LayerNorm's centering; `freeze`: the norm with a constant deviation, for all
    norms at once; `freeze-in-turn`: the same, one norm after the other; `taper`: the norm, whose
    gate closes in favor of a constant scale; `prepbn`: the norm, which fades in favor of BatchNorm
    beside the identity."""
    batches: Positive = 24
    """Training batches for fitting the layers; for `prepbn`, for its final statistics."""
    momentum: Fraction = 0.1
    """Weight of the new batch in the averages of `freeze-in-turn`, `taper` and `prepbn`."""


@section("distillation")
class DistillationSettings:
    """Distillation from the original, in addition to or instead of the task's loss."""

    name: DistillationName = "auto"
    """`logits`: divergence of the output distributions; `hidden`: error of each norm's output and
    of the model's output; `none`: only the task's loss; `auto`: logits if the model has them, else
    hidden."""
    share: Fraction | None = None
    """Weight of the distillation; the task's loss, if there is one, has the rest. None is 0.5 for a
    run whose removal takes at least a tenth of the original's updates, otherwise 1."""


@section("anchor")
class AnchorSettings:
    """Loss that keeps the deviations of tokens before the final norm close to each other."""

    weight: NotNegativeNumber = 0.0
    """Weight of this loss; 0 disables it. The published value is 0.1."""


@section("data")
class RemovalDataSettings:
    """Text, and size of batches and rows for a Hugging Face model; other models have batches."""

    path: str | None = None
    """Text; none is the run's text, or the embedded one."""
    other: str | None = None
    """Another text, whose test split is also measured at the end, to check that the model is as
    close to the original on other texts."""
    batch_size: Positive = 16
    """Rows in a batch."""
    sequence_length: Positive = 128
    """Largest number of tokens in a row."""


@section("training")
class RemovalTrainingSettings:
    """Length of the training, and its measurements."""

    steps: Positive | None = None
    """Updates of the weights; none means `share` of the original's, or 300 if those are not
    known."""
    share: Fraction | None = None
    """Updates as a fraction of the run's; none is 0.1 without `steps`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the layers in training; the weights and all measurements are float32."""
    dropout: bool = False
    """Whether the model's dropout is active. The original's outputs never have dropout."""
    num_threads: Positive | None = None
    """CPU threads of torch; none is torch's default. Small models are fastest with 1."""
    log_every: Positive = 10
    """Updates between two rows of metrics.csv."""
    validations: Positive = 10
    """Validations during the run, evenly spaced, each with a checkpoint."""
    validation_tokens: Positive | None = 32_768
    """Approximate number of tokens in a validation *during* the run; none is all. The final result
    always uses the whole split."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.share is not None:
            raise refuse(
                "training.share",
                self.share,
                f"cannot be combined with training.steps={self.steps}: leave one of them out",
            )
        if self.share == 0:
            raise refuse("training.share", 0, "leaves no update: give a number above 0")


@section("optimizer")
class RemovalOptimizerSettings:
    """Adam with decoupled weight decay on matrices."""

    learning_rate: PositiveNumber | None = None
    """Peak learning rate of the schedule; none is half of the run's, or 3e-4 if that is not
    known."""
    beta1: FractionBelowOne = 0.9
    """Decay of the average of gradients."""
    beta2: FractionBelowOne = 0.98
    """Decay of the average of squared gradients."""
    weight_decay: NotNegativeNumber = 0.0
    """Weight decay of matrices only."""
    clip_norm: PositiveNumber | None = 1.0
    """Largest norm of the gradient over all parameters; none does not clip."""
    accumulation: Positive = 1
    """Batches per update."""

    def resolved(self, learning_rate: float | None) -> OptimizerSettings:
        """Return the settings of the optimizer.

        Args:
            learning_rate: rate of the original's training, if known.
        """
        default = DEFAULT_RATE if learning_rate is None else RATE_SHARE * learning_rate
        return OptimizerSettings(**{**vars(self), "learning_rate": self.learning_rate or default})


@section()
class RemovalSettings:
    """All settings of a removal."""

    task: ClassVar[str] = "remove"
    seed: NotNegative = 0
    """Seed of the batches' order and of dropout."""
    method: MethodSettings = MethodSettings()
    distillation: DistillationSettings = DistillationSettings()
    anchor: AnchorSettings = AnchorSettings()
    data: RemovalDataSettings = RemovalDataSettings()
    optimizer: RemovalOptimizerSettings = RemovalOptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings(warmup_fraction=0.1, final_fraction=0.1)
    training: RemovalTrainingSettings = RemovalTrainingSettings()

    def __post_init__(self) -> None:
        if self.distillation.name == "none" and self.distillation.share is not None:
            raise refuse(
                "distillation.share",
                self.distillation.share,
                "has no effect with distillation.name=none: leave it out",
            )

    @property
    def label(self) -> str:
        """Name of the removal in tables and progress."""
        parts: list[str] = [self.method.name]
        if self.distillation.name != "none":
            parts.append("distillation")
        if self.anchor.weight:
            parts.append("anchor")
        return "+".join(parts)
