"""PowerNorm: one pass and a finishing program each way, two passes where the batch's ψ is used."""

from __future__ import annotations

import torch
from torch import Tensor

from powernorm.ops.kernels.triton.batch import measure, normalize
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
from powernorm.ops.kernels.triton.static import groups_of
from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.reference.power import PowerNormOutput


def power_norm(
    x: Tensor,
    residual: Tensor | None,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    second_moment: Tensor,
    gradient_moment: Tensor,
    groups: int,
    eps: float,
    use_batch: bool,
    max_ratio: float,
    released: bool,
    group_name: str,
) -> PowerNormOutput:
    """As `powernorm.ops.reference.power.power_norm`."""
    features = x.shape[-1]
    # The released backward alone can wait for the batch's ψ until the one pass is done.
    known = None if use_batch or max_ratio else (weight, bias, second_moment)
    measured = measure(x, residual, padding_mask, groups, eps, False, known)
    sums = torch.empty(2, features, dtype=torch.float64, device=x.device)
    statistics = accumulators(x, 3, features)
    moments = (vector(second_moment), vector(gradient_moment))
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
        y = normalize(measured, weight, bias, statistics, 0)
    return PowerNormOutput(y, measured.total, measured.scales, statistics, sums)


def power_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    inputs: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    scales: Tensor,
    statistics: Tensor,
    sums: Tensor,
    released: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `powernorm.ops.reference.power.power_norm_backward`."""
    rows, stride = rows_of(inputs)
    grad, grad_stride = rows_of(grad_y)
    added, added_stride = optional_rows(grad_total)
    mask = mask_rows(padding_mask)
    tokens, features = rows.shape
    grad_x = like(inputs)
    groups = groups_of(scales)
    # What fits by the registers it takes: 4, 3, and 2 with both groups and a mask.
    fitting = 4 - (groups > 0) - (mask is not None)
    tiling = plan(inputs, tokens, groups, 2 if added is None else 3, fitting)
    programs = tiling.programs
    partials = accumulators(inputs, 2 if mask is None else 3 + released, programs, features)
    launch(
        power_gradient_kernel, tiling, inputs.device,
        grad, added, rows, mask, vector(weight), scales, statistics, grad_x, partials,
        tokens, grad_stride, added_stride, stride, RELEASED=released,
    )  # fmt: skip
    grad_weight, grad_bias = accumulators(inputs, features), accumulators(inputs, features)
    carried = torch.empty(5, features, dtype=torch.float64, device=inputs.device)
    launch(
        power_gradients_kernel, finishing_plan(features, programs), inputs.device,
        partials, vector(weight), statistics, sums, grad_weight, grad_bias, carried,
        programs, tokens, MASKED=mask is not None, RELEASED=released,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias, carried
