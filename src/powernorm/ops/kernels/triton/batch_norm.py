"""BatchNorm, PowerNormV and BatchRenorm: two passes per direction with a reduction between."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from powernorm.ops.batch_norm import BatchNormArgs, BatchNormBackwardArgs, BatchNormOutput
from powernorm.ops.kernels.triton.device.backward import batch_gradient_kernel, batch_sums_kernel
from powernorm.ops.kernels.triton.device.finish import batch_statistics_kernel
from powernorm.ops.kernels.triton.device.forward import measure_kernel, normalize_kernel
from powernorm.ops.kernels.triton.device.gradients import batch_gradients_kernel
from powernorm.ops.kernels.triton.launch import (
    Plan,
    accumulators,
    finishing_plan,
    launch,
    like,
    mask_rows,
    optional_rows,
    plan,
    rows_of,
    scales_for,
    vector,
)
from powernorm.ops.kernels.triton.running_stats import update_running_stats
from powernorm.ops.kernels.triton.static_norm import groups_of
from powernorm.ops.operators import Gradients
from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.running_stats import Update, reduce_sums


class BatchMoments(NamedTuple):
    """Outputs of a measuring pass."""

    inputs: Tensor
    """The normalized input: x, or its sum with the residual."""
    total: Tensor | None
    scales: Tensor | None
    partials: Tensor
    """Each program's partial statistics, flat."""
    tiling: Plan
    y: Tensor | None
    """The output; None if a second pass computes it."""


def measure(
    x: Tensor,
    residual: Tensor | None,
    padding_mask: Tensor | None,
    groups: int,
    eps: float,
    centered: bool,
    normalize: tuple[Tensor | None, Tensor | None, Tensor] | None = None,
) -> BatchMoments:
    """Measure x in one pass, and normalize it if the divisor is known.

    Args:
        x: (..., C).
        residual: added to x first.
        padding_mask: True = padding.
        groups: groups of GroupScaling, applied first; 0 leaves it out.
        eps: added inside the roots.
        centered: compute mean and variance instead of the sum of squares.
        normalize: (γ, β, ψ²) to divide by ψ in the same pass.
    """
    rows, stride = rows_of(x)
    added, added_stride = optional_rows(residual)
    weight, bias, moment = (None, None, None) if normalize is None else map(vector, normalize)
    total = None if residual is None else like(x)
    scales = scales_for(x, rows.shape[0], groups)
    y = None if normalize is None else like(x)
    fitting = 5 - centered - (centered and padding_mask is not None)
    tiling = plan(x, rows.shape[0], groups, 1 if total is None else 2, fitting)
    quantities = 3 if centered else 1
    # The last entries: the number of tokens of each program.
    partials = accumulators(x, tiling.programs * (quantities * x.shape[-1] + 1))
    launch(
        measure_kernel, tiling, x.device,
        rows, added, mask_rows(padding_mask), weight, bias, moment,
        total, scales, y, partials, rows.shape[0], stride, added_stride, eps, CENTERED=centered,
    )  # fmt: skip
    inputs = x if total is None else total
    return BatchMoments(inputs, total, scales, partials, tiling, y)


def normalize(
    measured: BatchMoments,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    root_row: int,
    centered: bool = False,
    renorm: bool = False,
) -> Tensor:
    """Normalize the measured input: the second pass.

    Args:
        measured: result of `measure`.
        weight: γ.
        bias: β.
        statistics: (·, C), the mean in row 0 if centered, r and d in rows 3 and 4.
        root_row: the row of 1/σ.
        centered: subtract the mean.
        renorm: apply r and d.
    """
    rows, stride = rows_of(measured.inputs)
    y = like(measured.inputs)
    tiling = plan(measured.inputs, rows.shape[0], groups_of(measured.scales), 1, 8)
    launch(
        normalize_kernel, tiling, y.device,
        rows, vector(weight), vector(bias), measured.scales, statistics, y, rows.shape[0], stride,
        CENTERED=centered, RENORM=renorm, ROOT_ROW=root_row,
    )  # fmt: skip
    return y


def batch_norm(args: BatchNormArgs, update: Update | None = None) -> BatchNormOutput:
    """Normalize, and update running statistics by the sums of this process."""
    x, groups, eps, group_name = args.x, args.groups, args.eps, args.group_name
    centered = args.running_mean is not None
    measured = measure(x, args.residual, args.padding_mask, groups, eps, centered)
    features, programs = x.shape[-1], measured.tiling.programs
    sums = torch.empty(4 if centered else 2, features, dtype=torch.float64, device=x.device)
    statistics = accumulators(x, 6, features)
    running = (vector(args.running_mean), vector(args.running_var), vector(args.limits))
    finishing = finishing_plan(features, programs)
    constants = {"FLOOR": args.floor, "CENTERED": centered}

    def finish(merged: Tensor | None, written: Tensor | None) -> None:
        launch(
            batch_statistics_kernel, finishing, x.device,
            measured.partials, merged, *running, sums, written, programs, eps, **constants,
        )  # fmt: skip

    if group_name:
        finish(None, None)
        finish(reduce_sums(sums, centered, group_name), statistics)
    else:
        finish(None, statistics)
    renorm = args.limits is not None
    y = normalize(measured, args.weight, args.bias, statistics, 2, centered, renorm)
    if update is not None:
        update_running_stats(update, sums)
    return BatchNormOutput(y, measured.total, measured.scales, statistics, sums)


def batch_norm_backward(args: BatchNormBackwardArgs) -> Gradients:
    """Return the gradients."""
    inputs, scales, statistics = args.inputs, vector(args.scales), args.statistics.contiguous()
    rows, stride = rows_of(inputs)
    grad, grad_stride = rows_of(args.grad_y)
    mask = mask_rows(args.padding_mask)
    features, groups = inputs.shape[-1], groups_of(scales)
    tiling = plan(inputs, rows.shape[0], groups, 2, 4)
    partials = accumulators(inputs, 2, tiling.programs, features)
    launch(
        batch_sums_kernel, tiling, inputs.device,
        grad, rows, mask, scales, statistics, partials, rows.shape[0], grad_stride, stride,
    )  # fmt: skip
    grad_weight, grad_bias = accumulators(inputs, features), accumulators(inputs, features)
    coefficients = accumulators(inputs, 3, features)
    finishing = finishing_plan(features, tiling.programs)
    given = None if args.grad_statistics is None else args.grad_statistics.contiguous()

    def finish(merged: Tensor | None, sums: Tensor | None, written: Tensor | None) -> None:
        launch(
            batch_gradients_kernel, finishing, inputs.device,
            partials, merged, vector(args.weight), statistics, given, grad_weight, grad_bias,
            sums, written, tiling.programs, args.eps, FLOOR=args.floor, CENTERED=args.centered,
        )  # fmt: skip

    if args.group_name:
        sums = accumulators(inputs, 4, features)
        finish(None, sums, None)
        finish(all_reduce_sum(sums, args.group_name), None, coefficients)
    else:
        finish(None, None, coefficients)
    added, added_stride = optional_rows(args.grad_total)
    grad_x = like(inputs)
    tiling = plan(inputs, rows.shape[0], groups, 2 if added is None else 3, 4)
    launch(
        batch_gradient_kernel, tiling, inputs.device,
        grad, added, rows, mask, scales, statistics, coefficients, grad_x,
        rows.shape[0], grad_stride, added_stride, stride,
    )  # fmt: skip
    return Gradients(grad_x, grad_weight, grad_bias)
