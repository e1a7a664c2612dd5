"""The optimizer of a run and its learning rate."""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.training import OptimizerSettings, ScheduleSettings

_MILESTONES: Final = (0.5, 0.75)
"""Fractions of the run at which the schedule `steps` lowers the rate (He et al. 2016)."""
_DECAY: Final = 0.1
"""Factor of the rate at each milestone."""


def build_optimizer(
    model: nn.Module, config: OptimizerSettings, *, fused: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters.

    Weight decay applies to matrices only: for the weights of norms, which it would pull towards 0,
    its effect would differ between norms.

    Raises:
        InputError: `muon` is chosen, and the model has no weight for it.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = _hidden_matrices(model) if config.name == "muon" else []
    taken = {id(parameter) for parameter in hidden}
    parameters = [parameter for parameter in parameters if id(parameter) not in taken]
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
    adam = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )
    if config.name != "muon":
        return adam
    if not hidden:
        raise InputError(
            "optimizer.name=muon is for the weights of hidden linear layers, and this model has "
            "none: choose another"
        )
    muon = torch.optim.Muon(
        hidden,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        # Muon can then use Adam's learning rate (Liu et al. 2025, section 2.2).
        adjust_lr_fn="match_rms_adamw",
    )
    return JoinedOptimizer(muon, adam)


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters as one, with one state.

    Args:
        optimizers: the optimizers; their parameter groups are concatenated.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Perform a step of each optimizer."""
        del closure
        for optimizer in self._optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(dict(state_dict))
        self._share()  # loading has created new groups and a new state

    def _share(self) -> None:
        """Assign each optimizer its groups, and the shared state."""
        first = 0
        for optimizer in self._optimizers:
            last = first + len(optimizer.param_groups)
            optimizer.param_groups = self.param_groups[first:last]
            optimizer.state = self.state
            first = last


def _hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Return the weights of a model's hidden linear layers, for Muon.

    Weights of outputs (modules named `head` and adaptive softmaxes) and tables of embeddings are
    left out: Muon's orthogonalized step does not suit matrices of which a batch uses few rows.
    """
    outputs = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "head" or isinstance(module, nn.AdaptiveLogSoftmaxWithLoss)
    ]
    left_out = {id(weight) for output in outputs for weight in output.parameters()}
    left_out |= {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    found = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    return [weight for key, weight in found.items() if key not in left_out]


def learning_rate(config: ComparisonSettings, step: int) -> float:
    """Return the learning rate of the update that follows `step` updates."""
    factor = rate_factor(config.schedule, step, config.training.max_steps)
    return config.optimizer.learning_rate * factor


def rate_factor(schedule: ScheduleSettings, step: int, max_steps: int) -> float:
    """Return the learning rate of an update as a fraction of the highest.

    With w = warmup_steps, or warmup_fraction · max_steps (rounded, at least 1) if that is None, and
    t = step + 1, the number of the update from 1: t / w up to t = w for all schedules; after that,
    with progress p = (t - w) / (max_steps - w) and f = final_fraction,

    - `constant`: 1
    - `inverse_sqrt`: √(w / t) (Vaswani et al. 2017)
    - `linear`: 1 - (1 - f) p
    - `cosine`: f + (1 - f) (1 + cos πp) / 2 (Loshchilov and Hutter 2017)
    - `steps`: 0.1^m after m of the milestones ½ and ¾ of max_steps (He et al. 2016)

    Args:
        schedule: kind and fractions of the schedule.
        step: number of updates done so far.
        max_steps: number of updates of the whole run.
    """
    warmup = schedule.warmup_steps or max(1, round(schedule.warmup_fraction * max_steps))
    update = step + 1
    if update <= warmup:
        return update / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "steps":
        passed = sum(update > milestone * max_steps for milestone in _MILESTONES)
        return _DECAY**passed
    if schedule.name == "inverse_sqrt":
        return math.sqrt(warmup / update)
    progress = (update - warmup) / max(1, max_steps - warmup)
    fall = (1 - math.cos(math.pi * progress)) / 2 if schedule.name == "cosine" else progress
    return 1 - (1 - schedule.final_fraction) * fall
