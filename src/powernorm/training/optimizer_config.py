"""The sections `optimizer` and `schedule` of a configuration."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from powernorm.training.config_checks import (
    check_at_least,
    check_fraction,
    check_not_negative,
    check_one_of,
    check_positive,
)
from powernorm.training.config_fields import LATER

OptimizerName = Literal["adam", "sgd", "adagrad"]
ScheduleName = Literal["inverse_sqrt", "linear", "cosine", "constant", "steps"]


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Adam with decoupled weight decay on matrices, or another; clipping and accumulation."""

    learning_rate: float = 3e-3
    """The highest rate of the schedule."""
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    """Largest norm of the gradient over all parameters; None does not clip."""
    accumulation: int = 1
    """Micro-batches in an update."""
    name: OptimizerName = field(default="adam", metadata=LATER)
    """`adam`, with weight decay beside the gradient (AdamW); `sgd` or `adagrad`, with weight decay
    as a part of the gradient."""
    momentum: float = field(default=0.9, metadata=LATER)
    """Of `sgd`."""

    def __post_init__(self) -> None:
        check_one_of("optimizer.name", self.name, get_args(OptimizerName))
        check_fraction("optimizer.momentum", self.momentum, below_one=True)
        check_positive("optimizer.learning_rate", self.learning_rate)
        check_fraction("optimizer.beta1", self.beta1, below_one=True)
        check_fraction("optimizer.beta2", self.beta2, below_one=True)
        check_positive("optimizer.eps", self.eps)
        check_not_negative("optimizer.weight_decay", self.weight_decay)
        if self.clip_norm is not None:
            check_positive("optimizer.clip_norm", self.clip_norm)
        check_at_least("optimizer.accumulation", self.accumulation, 1)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How the learning rate goes through the run (`training.schedules` has the formulas)."""

    name: ScheduleName = "cosine"
    warmup_fraction: float = 0.1
    """Part of the run in which the rate rises linearly from 0."""
    final_fraction: float = 0.0
    """Rate at the end as a part of the highest, for `linear` and `cosine`."""
    warmup_steps: int | None = field(default=None, metadata=LATER)
    """Updates in which the rate rises; None is `warmup_fraction` of the run."""
    milestones: tuple[float, ...] = field(default=(0.5, 0.75), metadata=LATER)
    """Parts of the run after each of which the rate falls, for `steps`."""
    decay: float = field(default=0.1, metadata=LATER)
    """What it is multiplied by there."""

    def __post_init__(self) -> None:
        for milestone in self.milestones:
            check_fraction("schedule.milestones", milestone)
        check_positive("schedule.decay", self.decay)
        if self.warmup_steps is not None:
            check_at_least("schedule.warmup_steps", self.warmup_steps, 1)
        check_one_of("schedule.name", self.name, get_args(ScheduleName))
        check_fraction("schedule.warmup_fraction", self.warmup_fraction)
        check_fraction("schedule.final_fraction", self.final_fraction)
