"""Settings of a removal: the method, what it is trained by, on what and for how long."""

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
"""Updates where it is not known how long the original was trained."""
DEFAULT_RATE: Final = 3e-4
"""Learning rate where that of the original is not known."""
RATE_SHARE: Final = 0.5
"""Of the original's learning rate; a quarter of it was worse on the demo model, see docs."""
DEFAULT_SHARE: Final = 0.1
"""Updates as a part of the original's, where that is known."""
LONG_SHARE: Final = 0.1
"""The same, from which on the task's loss helps beside the distillation: see docs/removal.md."""
LONG_DISTILLATION: Final = 0.5
"""Weight of the distillation from there on."""


@section("method")
class MethodSettings:
    """What stands for a norm, and when it goes."""

    name: MethodName = "match"
    """`match`: an affine map per feature, fitted to the norm by least squares; `match-centered`:
    the same behind LayerNorm's centering; `freeze`: the norm with a constant deviation, all at
    once; `freeze-in-turn`: the same, one norm after the other; `taper`: the norm, whose gate closes
    in favor of a constant scale; `prepbn`: the norm, which fades in favor of BatchNorm beside the
    identity."""
    batches: Positive = 24
    """Training batches that the layers are fitted to; of `prepbn`, that its statistics are measured
    on in the end."""
    momentum: Fraction = 0.1
    """Of the averages of `freeze-in-turn`, `taper` and `prepbn`, the weight of the new batch."""


@section("distillation")
class DistillationSettings:
    """What the model learns from the original beside, or in place of, the task's own loss."""

    name: DistillationName = "auto"
    """`logits`: the divergence of the outputs' distributions; `hidden`: the error of what follows
    each norm and of the output; `none`: the task's loss alone; `auto`: logits where the model has
    them, else hidden."""
    share: Fraction | None = None
    """Weight of the distillation; the task's own loss, where there is one, has the rest. None is
    0.5 in a removal of a tenth of the original's own updates or more, of a run, and else 1."""


@section("anchor")
class AnchorSettings:
    """What holds the deviations of tokens together in front of the final norm."""

    weight: NotNegativeNumber = 0.0
    """Of the loss; 0 is none. The published one is 0.1."""


@section("data")
class RemovalDataSettings:
    """Of a Hugging Face model: how a text is cut. Others have batches of their own."""

    path: str | None = None
    """The text; none is a run's own, or the embedded one."""
    other: str | None = None
    """Another text, whose test split is measured at the end too: whether the model is as near to
    the original elsewhere."""
    batch_size: Positive = 16
    """Rows in a batch."""
    sequence_length: Positive = 128
    """Largest number of tokens in a row."""


@section("training")
class RemovalTrainingSettings:
    """How long, and what is measured meanwhile."""

    steps: Positive | None = None
    """Updates of the weights; none is `share` of the original's, or 300 where those are not
    known."""
    share: Fraction | None = None
    """Updates as a part of those of the original, of a run; none is 0.1 where there are no
    steps."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the layers compute in while they are trained; the weights, and all measurements, are
    float32."""
    dropout: bool = False
    """Whether the model's dropout acts. The original's outputs, which it learns, have none."""
    num_threads: Positive | None = None
    """CPU threads of torch; none leaves torch its choice. Small models are fastest with 1."""
    log_every: Positive = 10
    """Updates between two rows of metrics.csv."""
    validations: Positive = 10
    """Validations during the run, evenly spaced, each with a checkpoint."""
    validation_tokens: Positive | None = 32_768
    """About how many tokens a validation *during* the run reads; none is all. The result is
    always of the whole split."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.share is not None:
            raise refuse(
                "training.share",
                self.share,
                f"beside training.steps={self.steps}: both say how long it trains, leave one out",
            )
        if self.share == 0:
            raise refuse("training.share", 0, "leaves no update: give a part above 0")


@section("optimizer")
class RemovalOptimizerSettings:
    """Adam with decoupled weight decay on matrices."""

    learning_rate: PositiveNumber | None = None
    """The highest rate of the schedule; none is half of the original's, of a run, and 3e-4 where
    that is not known."""
    beta1: FractionBelowOne = 0.9
    """What its average of gradients keeps at a step."""
    beta2: FractionBelowOne = 0.98
    """What its average of squared gradients keeps at a step."""
    weight_decay: NotNegativeNumber = 0.0
    """Of matrices alone."""
    clip_norm: PositiveNumber | None = 1.0
    """Largest norm of the gradient over all parameters; none does not clip."""
    accumulation: Positive = 1
    """Batches in an update."""

    def resolved(self, learning_rate: float | None) -> OptimizerSettings:
        """Return the settings of the optimizer.

        Args:
            learning_rate: that of the original's training, where it is known.
        """
        default = DEFAULT_RATE if learning_rate is None else RATE_SHARE * learning_rate
        return OptimizerSettings(**{**vars(self), "learning_rate": self.learning_rate or default})


@section()
class RemovalSettings:
    """Everything that a removal depends on, beside the model itself."""

    task: ClassVar[str] = "remove"
    seed: NotNegative = 0
    """Of the order of the batches and of dropout."""
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
                "means nothing with distillation.name=none: leave it out",
            )

    @property
    def label(self) -> str:
        """What the removal is called in tables and progress."""
        parts: list[str] = [self.method.name]
        if self.distillation.name != "none":
            parts.append("distillation")
        if self.anchor.weight:
            parts.append("anchor")
        return "+".join(parts)
