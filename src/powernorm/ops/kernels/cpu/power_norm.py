"""PowerNorm on the CPU kernels."""

from __future__ import annotations

import torch

from powernorm.ops.kernels.cpu import tasks
from powernorm.ops.kernels.cpu.calls import (
    backward_prototype,
    backward_task,
    forward_task,
    run,
    saved,
    vector,
)
from powernorm.ops.kernels.cpu.prepared import Prepared
from powernorm.ops.power_norm import (
    OPERATOR,
    PowerNormArgs,
    PowerNormBackwardArgs,
    PowerNormGradients,
    PowerNormOutput,
)
from powernorm.ops.processes import all_reduce_sum


def power_norm(args: PowerNormArgs) -> PowerNormOutput:
    """Normalize."""
    use_batch, released, max_ratio = args.use_batch, args.released, args.max_ratio
    flags = use_batch * tasks.USE_BATCH | released * tasks.RELEASED
    both = flags | tasks.MEASURE | tasks.FINISH
    task, y, total, scales, acc, kept = forward_task(args, args.padding_mask, args.groups, both)
    features = task.features
    task.var = vector("second_moment", args.second_moment, features, acc, kept)
    task.gradient_moment = vector("gradient_moment", args.gradient_moment, features, acc, kept)
    task.max_ratio = max_ratio
    statistics = torch.empty((3, features), dtype=acc, device=tasks.CPU)
    sums = torch.empty((2, features), dtype=torch.float64, device=tasks.CPU)
    task.statistics, task.sums = statistics.data_ptr(), sums.data_ptr()
    if args.group_name and (use_batch or released or max_ratio):
        task.flags = flags | tasks.MEASURE
        run(tasks.POWER_NORM, task)
        merged = all_reduce_sum(sums, args.group_name)
        task.flags, task.sums = flags | tasks.FINISH, merged.data_ptr()
    run(tasks.POWER_NORM, task)
    return PowerNormOutput(y, total, scales, statistics, sums)


def prepare(args: PowerNormArgs) -> Prepared | None:
    """Return a prepared call like this one, None if the buffers cannot be used as they are."""
    features = args.x.shape[-1]
    released = args.released * tasks.RELEASED | tasks.MEASURE | tasks.FINISH
    flags = args.use_batch * tasks.USE_BATCH | released
    bare = args._replace(weight=None, bias=None)
    forward, _, _, _, acc, kept = forward_task(bare, None, args.groups, flags)
    forward.var = vector("second_moment", args.second_moment, features, acc, kept)
    moment = vector("gradient_moment", args.gradient_moment, features, acc, kept)
    forward.gradient_moment, forward.max_ratio = moment, args.max_ratio
    if kept:
        return None
    return Prepared(
        OPERATOR,
        tasks.POWER_NORM,
        args,
        forward,
        backward_prototype(args, released, 0.0),
        statistics=torch.empty((3, features), dtype=acc, device=tasks.CPU),
        sums=torch.empty((2, features), dtype=torch.float64, device=tasks.CPU),
        carried=torch.empty((5, features), dtype=torch.float64, device=tasks.CPU),
    )


def power_norm_backward(args: PowerNormBackwardArgs) -> PowerNormGradients:
    """Return the gradients and the sums that update the running statistics."""
    flags = args.released * tasks.RELEASED | tasks.MEASURE | tasks.FINISH
    task, grads, _, kept = backward_task(args, args.padding_mask, args.scales, flags, 0.0)
    carried = torch.empty((5, task.features), dtype=torch.float64, device=tasks.CPU)
    task.statistics, task.sums = saved(args.statistics, kept), saved(args.sums, kept)
    task.carried = carried.data_ptr()
    run(tasks.POWER_NORM_BACKWARD, task)
    return PowerNormGradients(grads.x, grads.weight, grads.bias, carried)
