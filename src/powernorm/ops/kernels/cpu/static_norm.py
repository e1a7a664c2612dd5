"""Norms by given statistics on the CPU kernels."""

from __future__ import annotations

import torch

from powernorm.ops.kernels.cpu import tasks
from powernorm.ops.kernels.cpu.calls import backward_task, forward_task, run, saved, vector
from powernorm.ops.operators import Gradients
from powernorm.ops.static_norm import StaticNormArgs, StaticNormBackwardArgs, StaticNormOutput


def static_norm(args: StaticNormArgs) -> StaticNormOutput:
    """Normalize."""
    flags = args.floor * tasks.FLOOR | tasks.MEASURE | tasks.FINISH
    task, y, total, scales, acc, kept = forward_task(args, None, args.groups, flags)
    features = task.features
    if args.mean is not None:
        task.mean = vector("mean", args.mean, features, acc, kept)
    task.var = vector("var", args.var, features, acc, kept)
    statistics = torch.empty((2, features), dtype=acc, device=tasks.CPU)
    task.statistics = statistics.data_ptr()
    run(tasks.STATIC_NORM, task)
    return StaticNormOutput(y, total, scales, statistics)


def static_norm_backward(args: StaticNormBackwardArgs) -> Gradients:
    """Return the gradients."""
    flags = tasks.MEASURE | tasks.FINISH
    task, grads, _, kept = backward_task(args, None, args.scales, flags, 0.0)
    task.statistics = saved(args.statistics, kept)
    run(tasks.STATIC_NORM_BACKWARD, task)
    return grads
