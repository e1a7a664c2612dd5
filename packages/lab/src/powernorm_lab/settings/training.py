"""The sections that all tasks have: optimizer, schedule and training."""

from typing import Annotated, Any, Final, Literal

from pydantic import PlainValidator

from powernorm.errors import InputError
from powernorm_lab.engine.warmup import WARMUP_FRACTION
from powernorm_lab.settings.section import (
    Fraction,
    FractionBelowOne,
    NotNegative,
    NotNegativeNumber,
    Positive,
    PositiveNumber,
    is_default,
    refuse,
    section,
    shown,
)

OptimizerName = Literal["adam", "sgd", "adagrad", "muon"]
ScheduleName = Literal["inverse_sqrt", "linear", "cosine", "constant", "steps"]
Precision = Literal["float32", "bfloat16", "float16"]
Accelerator = Literal["auto", "cpu", "gpu"]
Strategy = Literal["ddp", "fsdp2"]
AveragedStatistics = Literal["recalibrate", "average"]
SelectedBy = Literal["loss", "score"]


def _checked_interval(value: Any) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value == EPOCH or (is_number and 0 <= value < 2**63):
        return value
    raise InputError(
        f"training.diagnose_every={shown(value)} is no interval: give a number of updates, 0 for "
        f"never, or {EPOCH}"
    )


EPOCH: Final = "epoch"
Interval = Annotated[int | Literal["epoch"], PlainValidator(_checked_interval)]
"""So many updates, or an epoch."""


@section("optimizer")
class OptimizerSettings:
    """Adam with decoupled weight decay on matrices, or another; clipping and accumulation."""

    learning_rate: PositiveNumber = 3e-3
    """The highest rate of the schedule; with `muon` of all parameters."""
    beta1: FractionBelowOne = 0.9
    """Of `adam`, also beside `muon`: what its average of gradients keeps at a step."""
    beta2: FractionBelowOne = 0.98
    """Of `adam`, also beside `muon`: what its average of squared gradients keeps at a step."""
    eps: PositiveNumber = 1e-8
    """Of `adam` and `adagrad`: added to the root of the squares."""
    weight_decay: NotNegativeNumber = 0.0
    """Of matrices alone: it would pull the weights of a norm towards 0."""
    clip_norm: PositiveNumber | None = 1.0
    """Largest norm of the gradient over all parameters; none does not clip."""
    accumulation: Positive = 1
    """Micro-batches in an update."""
    name: OptimizerName = "adam"
    """`adam`, with weight decay beside the gradient (AdamW); `sgd` or `adagrad`, with weight decay
    as a part of the gradient; `muon` for the weights of linear maps inside the model, and `adam`
    for all else: embeddings, output, norms and biases."""
    momentum: FractionBelowOne = 0.9
    """Of `sgd`."""

    def __post_init__(self) -> None:
        if self.name != "sgd" and not is_default(self, "momentum"):
            raise refuse(
                "optimizer.momentum",
                self.momentum,
                f"means nothing with optimizer.name={self.name}: set optimizer.name=sgd, or leave "
                "it out",
            )


@section("schedule")
class ScheduleSettings:
    """How the learning rate goes through the run.

    `lab.training.optimization.rate_factor` has the formulas.
    """

    name: ScheduleName = "cosine"
    """How the rate falls after the warm-up; `steps` is to a tenth after half of the run, and again
    after three quarters (He et al. 2016)."""
    warmup_fraction: Fraction = 0.1
    """Part of the run in which the rate rises linearly from 0."""
    final_fraction: Fraction = 0.0
    """Rate at the end as a part of the highest, for `linear` and `cosine`."""
    warmup_steps: Positive | None = None
    """Updates in which the rate rises; none is `warmup_fraction` of the run."""


@section("training")
class TrainingSettings:
    """The length of the run and what is watched during it."""

    max_steps: Positive = 500
    """Updates of the weights."""
    precision: Precision = "float32"
    """What the layers compute in; the weights are float32."""
    accelerator: Accelerator = "auto"
    """What is trained on; `auto` is a GPU where there is one."""
    num_threads: Positive | None = None
    """CPU threads of torch; none leaves torch its choice. Small models are fastest with 1."""
    log_every: Positive = 10
    """Updates between two rows of metrics.csv."""
    validate_every: Positive = 100
    """Updates between two validations, each of which also writes the checkpoints; the last
    update is always followed by one."""
    validation_tokens: Positive | None = None
    """About how many tokens of the valid split a validation *during* the run reads, in evenly
    spaced segments; none is all. The result is always of the whole split."""
    patience: Positive | None = None
    """Validations without a better loss after which the run stops early, or scored ones without a
    better score where that selects; none never stops."""
    monitor_every: NotNegative = 50
    """Updates between two rows a layer of norms.csv; 0 switches the monitor off."""
    diagnose_every: Interval = 0
    """Updates between two diagnoses of the norms during the run, or `epoch`: before the first
    update, then after every so many or after every epoch, and after the last one; 0 makes none.
    They are written to diagnoses.jsonl and change nothing in the training."""
    tid_batches: NotNegative = 50
    """Training batches in each pass of the two-pass TID at the end, and of `record_scales`; 0
    leaves the TID out."""
    norm_warmup_fraction: Fraction = WARMUP_FRACTION
    """Part of the run in which PowerNorm, MABN and BatchRenorm still use batch statistics, unless
    `norm_options` says otherwise."""
    early_checkpoint: Fraction | None = None
    """Part of the run after which checkpoints/early.ckpt is kept, rounded to an update; none keeps
    none."""
    record_scales: bool = False
    """Whether γ and the batches' deviations are written for every norm layer at the end."""
    average_checkpoints: NotNegative = 0
    """Weights of so many of the last validations are kept, and their average is what is scored;
    0 scores the best checkpoint."""
    average_statistics: AveragedStatistics = "recalibrate"
    """Running statistics of the average: re-estimated on training batches, or averaged too, as
    those that a norm trains by always are."""
    recalibration_batches: Positive = 50
    """Training batches from which they are re-estimated."""
    compile: bool = False
    """Whether `torch.compile` makes kernels of the layers for the training: some minutes at first,
    then faster steps on a GPU."""
    strategy: Strategy = "ddp"
    """How several processes share the work: every one has the whole model (`ddp`), or a part of
    each weight (`fsdp2`)."""

    def __post_init__(self) -> None:
        if self.diagnose_every and self.strategy == "fsdp2":
            raise refuse(
                "training.diagnose_every",
                self.diagnose_every,
                "needs the whole model in every process, and training.strategy=fsdp2 divides it: "
                "set training.strategy=ddp, or use `powernorm diagnose` afterwards instead",
            )
        if self.tid_batches == 1:
            raise refuse(
                "training.tid_batches",
                self.tid_batches,
                "compares one batch with itself: give 2 or more, or 0 to leave the TID out",
            )
        if self.record_scales and not self.tid_batches:
            raise refuse(
                "training.record_scales",
                self.record_scales,
                "needs batches for the deviations: set training.tid_batches to 2 or more",
            )


@section("training")
class SmoothedTrainingSettings(TrainingSettings):
    """The same where the loss is a cross-entropy over classes."""

    label_smoothing: FractionBelowOne = 0.0
    """In the training loss only; logged and evaluated losses have none."""


@section("training")
class ScoredTrainingSettings(TrainingSettings):
    """The same where validations can tell the task's own score, such as accuracy, in percent."""

    score_every: NotNegative = 1
    """Validations from one whose score is told to the next, in metrics.csv as `valid_score`; where
    there are any, that of the last is; 0 tells none."""
    select_by: SelectedBy = "score"
    """What the best checkpoint is best by, and what `patience` waits for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select_by == "score" and not self.score_every:
            raise refuse(
                "training.select_by",
                self.select_by,
                "needs scores: set training.score_every to 1 or more, or training.select_by=loss",
            )


@section("training")
class ClassifierTrainingSettings(ScoredTrainingSettings, SmoothedTrainingSettings):
    """The same where what is scored are classes, and the loss is a cross-entropy over them."""
