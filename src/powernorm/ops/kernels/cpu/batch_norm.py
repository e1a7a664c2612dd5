"""BatchNorm, PowerNormV and BatchRenorm on the CPU kernels."""

from __future__ import annotations

import ctypes

import torch

from powernorm.ops.batch_norm import (
    OPERATOR,
    BatchNormArgs,
    BatchNormBackwardArgs,
    BatchNormOutput,
)
from powernorm.ops.kernels.cpu import tasks
from powernorm.ops.kernels.cpu.calls import (
    backward_prototype,
    backward_task,
    forward_task,
    mark_written,
    native_update,
    run,
    saved,
    vector,
)
from powernorm.ops.kernels.cpu.prepared import Prepared
from powernorm.ops.operators import Gradients
from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.running_stats import Update, reduce_sums, update_running_stats


def batch_norm(args: BatchNormArgs, update: Update | None = None) -> BatchNormOutput:
    """Normalize, and update running statistics by the sums of this process."""
    x, running_mean, limits, group_name = args.x, args.running_mean, args.limits, args.group_name
    centered = running_mean is not None
    flags = centered * tasks.CENTERED | args.floor * tasks.FLOOR
    both = flags | tasks.MEASURE | tasks.FINISH
    task, y, total, scales, acc, kept = forward_task(args, args.padding_mask, args.groups, both)
    features = x.shape[-1]
    statistics = torch.empty((6, features), dtype=acc, device=tasks.CPU)
    task.statistics = statistics.data_ptr()
    if update is not None and limits is None:
        native = native_update(update, features)
        if native is not None and native.wide == (acc is torch.float64):
            # The updated buffers are the ones that are read; `prepare` has checked them.
            task.mean, task.var = native.first, native.second
            task.update = ctypes.addressof(native)
            run(tasks.BATCH_NORM, task)
            mark_written(update)
            return BatchNormOutput(y, total, scales, statistics, None)
    if running_mean is not None:
        task.mean = vector("running_mean", running_mean, features, acc, kept)
    task.var = vector("running_var", args.running_var, features, acc, kept)
    if limits is not None:
        task.limits = vector("limits", limits, 2, acc, kept)
    sums = torch.empty((4 if centered else 2, features), dtype=torch.float64, device=tasks.CPU)
    task.sums = sums.data_ptr()
    if group_name:
        task.flags = flags | tasks.MEASURE
        run(tasks.BATCH_NORM, task)
        merged = reduce_sums(sums, centered, group_name)
        task.flags, task.sums = flags | tasks.FINISH, merged.data_ptr()
    run(tasks.BATCH_NORM, task)
    if update is not None:
        update_running_stats(update, sums)
    return BatchNormOutput(y, total, scales, statistics, sums)


def prepare(args: BatchNormArgs, update: Update | None) -> Prepared | None:
    """Return a prepared call like this one, None if the buffers cannot be used as they are."""
    features, centered = args.x.shape[-1], args.running_mean is not None
    flags = centered * tasks.CENTERED | args.floor * tasks.FLOOR | tasks.MEASURE | tasks.FINISH
    bare = args._replace(weight=None, bias=None)
    forward, _, _, _, acc, kept = forward_task(bare, None, args.groups, flags)
    if args.running_mean is not None:
        forward.mean = vector("running_mean", args.running_mean, features, acc, kept)
    forward.var = vector("running_var", args.running_var, features, acc, kept)
    native = None if update is None else native_update(update, features)
    if kept or (update is not None and native is None):
        return None
    if native is not None:
        forward.update = ctypes.addressof(native)
    sums = None if args.carrier is None else torch.empty_like(args.carrier, requires_grad=False)
    return Prepared(
        OPERATOR,
        tasks.BATCH_NORM,
        args,
        forward,
        backward_prototype(args, flags, args.eps),
        statistics=torch.empty((6, features), dtype=acc, device=tasks.CPU),
        sums=sums,
        returns_statistics=sums is not None,
        alive=native,
    )


def batch_norm_backward(args: BatchNormBackwardArgs) -> Gradients:
    """Return the gradients."""
    statistics, given, group_name = args.statistics, args.grad_statistics, args.group_name
    flags = args.centered * tasks.CENTERED | args.floor * tasks.FLOOR
    both = flags | tasks.MEASURE | tasks.FINISH
    task, grads, acc, kept = backward_task(args, args.padding_mask, args.scales, both, args.eps)
    features = task.features
    if given is not None:
        task.grad_statistics = vector("grad_statistics", given, 6 * features, acc, kept)
    task.statistics = saved(statistics, kept)
    if group_name:
        sums = torch.empty((4, features), dtype=torch.float64, device=tasks.CPU)
        task.flags, task.sums = flags | tasks.MEASURE, sums.data_ptr()
        run(tasks.BATCH_NORM_BACKWARD, task)
        merged = all_reduce_sum(sums, group_name)
        task.flags, task.sums = flags | tasks.FINISH, merged.data_ptr()
    run(tasks.BATCH_NORM_BACKWARD, task)
    return grads
