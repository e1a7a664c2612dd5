"""The norms on the CPU kernels.

`batch_norm` serves BatchNorm, PowerNormV and BatchRenorm, `static_norm` norms by given statistics,
`token_norm` the per-token family.
"""

from __future__ import annotations

import ctypes

import torch

from powernorm.ops.batch_norm import (
    OPERATOR as BATCH_NORM,
)
from powernorm.ops.batch_norm import (
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
from powernorm.ops.power_norm import (
    OPERATOR as POWER_NORM,
)
from powernorm.ops.power_norm import (
    PowerNormArgs,
    PowerNormBackwardArgs,
    PowerNormGradients,
    PowerNormOutput,
)
from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.running_stats import Update, reduce_sums, update_running_stats
from powernorm.ops.static_norm import StaticNormArgs, StaticNormBackwardArgs, StaticNormOutput
from powernorm.ops.token_norm import (
    OPERATOR as TOKEN_NORM,
)
from powernorm.ops.token_norm import (
    TokenNormArgs,
    TokenNormBackwardArgs,
    TokenNormOutput,
)


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


def prepare_batch_norm(args: BatchNormArgs, update: Update | None) -> Prepared | None:
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
        BATCH_NORM,
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


def prepare_power_norm(args: PowerNormArgs) -> Prepared | None:
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
        POWER_NORM,
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


def prepare_token_norm(args: TokenNormArgs) -> Prepared:
    """Return a prepared call like this one."""
    shape = args.centered * tasks.CENTERED | args.released * tasks.RELEASED
    shape |= tasks.MEASURE | tasks.FINISH
    detached = args.detach_mean * tasks.DETACH_MEAN | args.detach_std * tasks.DETACH_STD
    forward, *_ = forward_task(args._replace(weight=None, bias=None), None, 0, shape)
    backward = backward_prototype(args, shape | detached, 0.0)
    for task in (forward, backward):
        task.groups, task.scale, task.k = args.groups, args.scale, args.k
    return Prepared(TOKEN_NORM, tasks.TOKEN_NORM, args, forward, backward)


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
