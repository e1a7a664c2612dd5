"""Per-token norms on the CPU kernels."""

from __future__ import annotations

import torch

from powernorm.ops.kernels.cpu import tasks
from powernorm.ops.kernels.cpu.calls import (
    backward_prototype,
    backward_task,
    forward_task,
    run,
    saved,
)
from powernorm.ops.kernels.cpu.prepared import Prepared
from powernorm.ops.operators import Gradients
from powernorm.ops.token_norm import (
    OPERATOR,
    TokenNormArgs,
    TokenNormBackwardArgs,
    TokenNormOutput,
)


def token_norm(args: TokenNormArgs) -> TokenNormOutput:
    """Normalize."""
    flags = args.centered * tasks.CENTERED | args.released * tasks.RELEASED
    flags |= tasks.MEASURE | tasks.FINISH
    task, y, total, _, acc, _kept = forward_task(args, None, 0, flags)
    task.groups, task.scale, task.k = args.groups, args.scale, args.k
    statistics = torch.empty((2, task.tokens, args.groups), dtype=acc, device=tasks.CPU)
    task.scales = statistics.data_ptr()
    run(tasks.TOKEN_NORM, task)
    return TokenNormOutput(y, total, statistics)


def prepare(args: TokenNormArgs) -> Prepared:
    """Return a prepared call like this one."""
    shape = args.centered * tasks.CENTERED | args.released * tasks.RELEASED
    shape |= tasks.MEASURE | tasks.FINISH
    detached = args.detach_mean * tasks.DETACH_MEAN | args.detach_std * tasks.DETACH_STD
    forward, *_ = forward_task(args._replace(weight=None, bias=None), None, 0, shape)
    backward = backward_prototype(args, shape | detached, 0.0)
    for task in (forward, backward):
        task.groups, task.scale, task.k = args.groups, args.scale, args.k
    return Prepared(OPERATOR, tasks.TOKEN_NORM, args, forward, backward)


def token_norm_backward(args: TokenNormBackwardArgs) -> Gradients:
    """Return the gradients."""
    flags = args.centered * tasks.CENTERED | args.released * tasks.RELEASED
    flags |= args.detach_mean * tasks.DETACH_MEAN | args.detach_std * tasks.DETACH_STD
    flags |= tasks.MEASURE | tasks.FINISH
    statistics = args.statistics
    task, grads, _, kept = backward_task(args, None, None, flags, 0.0, args.affine)
    task.groups, task.scale, task.k = statistics.shape[-1], args.scale, args.k
    task.scales = saved(statistics, kept)
    run(tasks.TOKEN_NORM_BACKWARD, task)
    return grads
