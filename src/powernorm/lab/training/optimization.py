"""The optimizer of a run and its learning rate."""

import math

import torch
from torch import nn

from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.training import OptimizerSettings, ScheduleSettings


def build_optimizer(
    model: nn.Module, config: OptimizerSettings, *, fused: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters.

    Weight decay applies to matrices only: it would pull the weights of a norm towards 0, which
    means another thing for every norm.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(
            groups, lr=config.learning_rate, momentum=config.momentum, fused=fused
        )
    if config.name == "adagrad":
        return torch.optim.Adagrad(groups, lr=config.learning_rate, eps=config.eps)
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )


def optimized(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def learning_rate(config: ComparisonSettings, step: int) -> float:
    """Return the learning rate of the update after `step` ones."""
    factor = rate_factor(config.schedule, step, config.training.max_steps)
    return config.optimizer.learning_rate * factor


def rate_factor(schedule: ScheduleSettings, step: int, max_steps: int) -> float:
    """Return the learning rate of an update as a fraction of the highest.

    With w = warmup_steps, or warmup_fraction · max_steps (rounded, at least 1) where that is None,
    and t = step + 1, the number of the update from 1: t / w up to t = w for all schedules; after
    that, with progress
    p = (t - w) / (max_steps - w) and the fraction f = final_fraction,

    - `constant`: 1
    - `inverse_sqrt`: √(w / t) (Vaswani et al. 2017)
    - `linear`: 1 - (1 - f) p
    - `cosine`: f + (1 - f) (1 + cos πp) / 2 (Loshchilov and Hutter 2017)
    - `steps`: decay^m after m of the milestones, which are parts of max_steps (He et al. 2016)

    Args:
        schedule: the kind and its fractions.
        step: updates done so far, from 0.
        max_steps: updates of the whole run.
    """
    warmup = schedule.warmup_steps or max(1, round(schedule.warmup_fraction * max_steps))
    update = step + 1
    if update <= warmup:
        return update / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "steps":
        passed = sum(update > milestone * max_steps for milestone in schedule.milestones)
        return float(schedule.decay**passed)
    if schedule.name == "inverse_sqrt":
        return math.sqrt(warmup / update)
    progress = (update - warmup) / max(1, max_steps - warmup)
    fall = (1 - math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else progress
    return 1 - (1 - schedule.final_fraction) * fall
