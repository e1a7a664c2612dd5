"""PowerNorm: a pass and a reduction per direction, or two passes if the batch's ψ is used."""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.ops.kernels.triton.batch_norm import measure, normalize
from powernorm.ops.kernels.triton.device.backward import power_gradient_kernel
from powernorm.ops.kernels.triton.device.gradients import (
    power_gradients_kernel,
    power_statistics_kernel,
)
from powernorm.ops.kernels.triton.launch import (
    accumulators,
    finishing_plan,
    launch,
    like,
    mask_rows,
    optional_rows,
    plan,
    rows_of,
    vector,
)
from powernorm.ops.kernels.triton.static_norm import groups_of
from powernorm.ops.power_norm import (
    PowerNormArgs,
    PowerNormBackwardArgs,
    PowerNormGradients,
    PowerNormOutput,
)
from powernorm.ops.processes import all_reduce_sum


def power_norm(args: PowerNormArgs) -> PowerNormOutput:
    """Normalize."""
    x, eps, group_name = args.x, args.eps, args.group_name
    use_batch, max_ratio, released = args.use_batch, args.max_ratio, args.released
    features = x.shape[-1]
    # Only the released backward can do without the batch's ψ until the one pass is done.
    known = None if use_batch or max_ratio else (args.weight, args.bias, args.second_moment)
    measured = measure(x, args.residual, args.padding_mask, args.groups, eps, False, known)
    sums = torch.empty(2, features, dtype=torch.float64, device=x.device)
    statistics = accumulators(x, 3, features)
    moments = (vector(args.second_moment), vector(args.gradient_moment))
    programs = measured.tiling.programs
    finishing = finishing_plan(features, programs)
    constants = {"USE_BATCH": use_batch, "BOUNDED": max_ratio > 0, "RELEASED": released}

    def finish(merged: Tensor | None, written: Tensor | None) -> None:
        launch(
            power_statistics_kernel, finishing, x.device,
            measured.partials, merged, *moments, sums, written, programs, eps, max_ratio**2,
            **constants,
        )  # fmt: skip

    if group_name and (use_batch or released or max_ratio):
        finish(None, None)
        finish(all_reduce_sum(sums, group_name), statistics)
    else:
        finish(None, statistics)
    y = measured.y
    if y is None:
        y = normalize(measured, args.weight, args.bias, statistics, 0)
    return PowerNormOutput(y, measured.total, measured.scales, statistics, sums)


def power_norm_backward(args: PowerNormBackwardArgs) -> PowerNormGradients:
    """Return the gradients and the sums that update the running statistics."""
    inputs, scales, released = args.inputs, vector(args.scales), args.released
    statistics, sums = args.statistics.contiguous(), args.sums.contiguous()
    rows, stride = rows_of(inputs)
    grad, grad_stride = rows_of(args.grad_y)
    added, added_stride = optional_rows(args.grad_total)
    mask = mask_rows(args.padding_mask)
    tokens, features = rows.shape
    grad_x = like(inputs)
    groups = groups_of(scales)
    # Programs per multiprocessor by registers: 4, 3, and 2 with both groups and a mask.
    fitting = 4 - (groups > 0) - (mask is not None)
    tiling = plan(inputs, tokens, groups, 2 if added is None else 3, fitting)
    programs = tiling.programs
    partials = accumulators(inputs, 2 if mask is None else 3 + released, programs, features)
    weight = vector(args.weight)
    launch(
        power_gradient_kernel, tiling, inputs.device,
        grad, added, rows, mask, weight, scales, statistics, grad_x, partials,
        tokens, grad_stride, added_stride, stride, RELEASED=released,
    )  # fmt: skip
    grad_weight, grad_bias = accumulators(inputs, features), accumulators(inputs, features)
    carried = torch.empty(5, features, dtype=torch.float64, device=inputs.device)
    launch(
        power_gradients_kernel, finishing_plan(features, programs), inputs.device,
        partials, weight, statistics, sums, grad_weight, grad_bias, carried,
        programs, tokens, MASKED=mask is not None, RELEASED=released,
    )  # fmt: skip
    return PowerNormGradients(grad_x, grad_weight, grad_bias, carried)
