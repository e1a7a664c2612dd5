"""Sections that all tasks share: optimizer, schedule and training."""

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
        f"training.diagnose_every={shown(value)} is not an interval: give a number of updates, 0 "
        f"for never, or {EPOCH}"
    )


EPOCH: Final = "epoch"
Interval = Annotated[int | Literal["epoch"], PlainValidator(_checked_interval)]
"""A number of updates, or an epoch."""


@section("optimizer")
class OptimizerSettings:
    """Optimizer, Adam with decoupled weight decay by default; clipping and accumulation."""

    learning_rate: PositiveNumber = 3e-3
    """Peak learning rate of the schedule; with `muon`, of all parameters."""
    beta1: FractionBelowOne = 0.9
    """Decay of `adam`'s average of gradients, also beside `muon`."""
    beta2: FractionBelowOne = 0.98
    """Decay of `adam`'s average of squared gradients, also beside `muon`."""
    eps: PositiveNumber = 1e-8
    """Number that `adam` and `adagrad` add to the root of the squares."""
    weight_decay: NotNegativeNumber = 0.0
    """Weight decay of matrices only, because it would pull the weights of a norm towards 0."""
    clip_norm: PositiveNumber | None = 1.0
    """Largest norm of the gradient over all parameters; none does not clip."""
    accumulation: Positive = 1
    """Micro-batches per update."""
    name: OptimizerName = "adam"
    """`adam`, with decoupled weight decay (AdamW); `sgd` or `adagrad`, with weight decay as a part
    of the gradient; `muon` for the weights of linear maps inside the model, with `adam` for all
    other parameters: embeddings, output, norms and biases."""
    momentum: FractionBelowOne = 0.9
    """Momentum of `sgd`."""

    def __post_init__(self) -> None:
        if self.name != "sgd" and not is_default(self, "momentum"):
            raise refuse(
                "optimizer.momentum",
                self.momentum,
                f"has no effect with optimizer.name={self.name}: set optimizer.name=sgd, or leave "
                "it out",
            )


@section("schedule")
class ScheduleSettings:
    """Learning rate schedule.

    `lab.training.optimization.rate_factor` has the formulas.
    """

    name: ScheduleName = "cosine"
    """Decay after the warm-up; `steps` divides the rate by 10 after half of the run, and again
    after three quarters (He et al. 2016)."""
    warmup_fraction: Fraction = 0.1
    """Fraction of the run in which the rate rises linearly from 0."""
    final_fraction: Fraction = 0.0
    """Final rate as a fraction of the peak, for `linear` and `cosine`."""
    warmup_steps: Positive | None = None
    """Updates in which the rate rises; none means `warmup_fraction` of the run."""


@section("training")
class TrainingSettings:
    """Length, precision, validation and monitoring of a run."""

    max_steps: Positive = 500
    """Updates of the weights."""
    precision: Precision = "float32"
    """Precision of the layers' computation; the weights are float32."""
    accelerator: Accelerator = "auto"
    """Device type; `auto` uses a GPU if there is one."""
    num_threads: Positive | None = None
    """CPU threads of torch; none is torch's default. Small models are fastest with 1."""
    log_every: Positive = 10
    """Updates between two rows of metrics.csv."""
    validate_every: Positive = 100
    """Updates between two validations, which also write the checkpoints; the last update is always
    followed by one."""
    validation_tokens: Positive | None = None
    """Approximate number of tokens of the valid split for a validation *during* the run, in evenly
    spaced segments; none is all. The final result always uses the whole split."""
    patience: Positive | None = None
    """Validations without a better loss after which the run stops early, or scored validations
    without a better score if the score selects; none never stops."""
    monitor_every: NotNegative = 50
    """Updates between two rows per layer of norms.csv; 0 disables the monitor."""
    diagnose_every: Interval = 0
    """Updates between two diagnoses of the norms during the run, or `epoch`: before the first
    update, at this interval, and after the last update; 0 disables them. They are written to
    diagnoses.jsonl and do not affect the training."""
    tid_batches: NotNegative = 50
    """Training batches in each pass of the two-pass TID at the end, and of `record_scales`; 0
    disables the TID."""
    norm_warmup_fraction: Fraction = WARMUP_FRACTION
    """Fraction of the run in which PowerNorm, MABN and BatchRenorm still use batch statistics,
    unless `norm_options` sets their warm-up."""
    early_checkpoint: Fraction | None = None
    """Fraction of the run after which checkpoints/early.ckpt is kept, rounded to an update; none
    keeps no such checkpoint."""
    record_scales: bool = False
    """Whether γ and the batches' deviations are written for every norm layer at the end."""
    average_checkpoints: NotNegative = 0
    """Number of last validations whose weights are averaged for the final score; 0 scores the best
    checkpoint."""
    average_statistics: AveragedStatistics = "recalibrate"
    """Running statistics of the averaged model: re-estimated on training batches, or averaged.
    Statistics that a norm uses in training are always averaged."""
    recalibration_batches: Positive = 50
    """Training batches for re-estimating the averaged model's statistics."""
    compile: bool = False
    """Whether `torch.compile` compiles the layers for training: some minutes at first, then faster
    steps on a GPU."""
    strategy: Strategy = "ddp"
    """Distribution over several processes: each has the whole model (`ddp`), or a part of each
    weight (`fsdp2`)."""

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
    """Training settings for a cross-entropy over classes."""

    label_smoothing: FractionBelowOne = 0.0
    """Label smoothing of the training loss; logged and evaluated losses have none."""


@section("training")
class ScoredTrainingSettings(TrainingSettings):
    """Training settings for a task with a score of its own, such as accuracy, in percent."""

    score_every: NotNegative = 1
    """Validations per scored validation, whose score is `valid_score` in metrics.csv. Unless this
    is 0, the last validation is scored, too; 0 scores none."""
    select_by: SelectedBy = "score"
    """Measure that selects the best checkpoint and that `patience` follows."""

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
    """Training settings for scored classes with a cross-entropy over them."""
