"""Effect of a norm on the gradient that flows back through it.

Per token (Xu et al. 2019): Theorem 1 gives the effect of each norm on the mean and the variance
over features of a token's gradient; equation 7 is the share of normalized values above 1/k, which
AdaNorm assumes to be small.

Per batch (Shen et al. 2020, eq. 3 and Figures 3, 4): the parts that flow through its statistics,
as Frobenius norms. With g = γ ∂L/∂y a BatchNorm's input gradient is
`(1/σ_B)(g_i - mean_j g_j - x̂_i mean_j(g_j x̂_j))`: the middle term is g_μ, the last g_σ². Except
for x̂_i both are the same for all tokens, so their norms follow from sums per feature: of the
input, its square, ∂L/∂y and ∂L/∂y times the input. No token is read again, and the sums of several
processes add up. They are float64 on the host; a leading dimension counts calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.norms import AdaNorm, BatchStatisticsNorm, SimpleLayerNorm
from powernorm.norms.moving_average import MovingAverageBatchNorm
from powernorm.norms.pointwise import SaturatingNorm
from powernorm.norms.power import PowerNorm
from powernorm.norms.renorm import BatchRenorm
from powernorm.norms.reparametrized import ProgressiveRepBatchNorm
from powernorm.norms.unified import UnifiedNorm
from powernorm.ops.arrays import reciprocal_root
from powernorm.ops.moments import Moments
from powernorm.ops.moving_average_norm import RATIO_LIMIT
from powernorm.ops.unified_norm import geometric_mean, is_left_out

_PAPERS_K: Final = 0.1


def wide(x: Tensor) -> Tensor:
    """Return half precision as float32, other types unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def gradient_sums(gradient: Tensor) -> Tensor:
    """Return Σ of squares and Σ over tokens of mean and variance over features, (3,) float64.

    Args:
        gradient: (..., C).
    """
    gradient = wide(gradient).reshape(-1, gradient.shape[-1])
    size = gradient.shape[-1]
    mean = gradient.sum(-1).double() / size
    squares = torch.linalg.vector_norm(gradient, dim=-1).double().square()
    variance = squares / size - mean.square()
    return torch.stack([squares.sum(), mean.sum(), variance.sum()])


def input_sums(module: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return sums over the valid tokens of a norm's input, (5,) float64.

    They are the number of tokens, the sum of all values (finite if all values are), the sum of the
    tokens' mean squares, the number of outliers or saturated values, and the number of values that
    were tested for that.

    Args:
        module: the norm.
        x: its input, (..., C).
        padding_mask: True = padding, which is ignored.
    """
    tokens = wide(x).reshape(-1, x.shape[-1])
    size = tokens.shape[-1]
    total = tokens.sum(-1, dtype=torch.float64)
    square = torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float64).square() / size
    above = _above(module, tokens, total)
    if padding_mask is None:
        count = total.new_full((), float(tokens.shape[0]))
    else:
        valid = ~padding_mask.reshape(-1)
        count = valid.sum(dtype=torch.float64)
        total, square = torch.where(valid, total, 0.0), torch.where(valid, square, 0.0)
        above = None if above is None else torch.where(valid, above, 0)
    sums = [count, total.sum(), square.sum()]
    if above is None:
        zero = torch.zeros_like(count)
        return torch.stack([*sums, zero, zero])
    return torch.stack([*sums, above.sum(dtype=torch.float64), count * size])


def _above(module: nn.Module, tokens: Tensor, total: Tensor) -> Tensor | None:
    """Return the number of values of each token beyond a bound, (tokens,); None without a bound.

    It is 1/k for |y| of AdaNorm and SimpleLayerNorm, 1 for the argument of a saturating function.
    """
    if isinstance(module, SaturatingNorm):
        saturated: Tensor = (module.argument(tokens).abs() > 1).sum(-1)
        return saturated
    if not isinstance(module, AdaNorm | SimpleLayerNorm):
        return None
    k = module.k if isinstance(module, AdaNorm) else _PAPERS_K
    size = tokens.shape[-1]
    deviations = tokens - (total / size).to(tokens.dtype).unsqueeze(-1)
    squares = torch.linalg.vector_norm(deviations, dim=-1, keepdim=True).square()
    if module.variant == "released":
        root = (squares / (size - 1)).sqrt() + module.eps
    else:
        root = (squares / size + module.eps).sqrt()
    above: Tensor = (deviations.abs() * abs(k) > root).sum(-1)
    return above


@dataclass(frozen=True, eq=False)
class Calls:
    """Records of several calls of one layer.

    Attributes:
        moments: moments of the normalized values, over valid tokens of all processes: count (n, 1),
            mean and squares (n, C).
        state: result of `state_of` before each call, (n, k, C).
        products: Σ ∂L/∂y and Σ ∂L/∂y t over all positions, with t the values that the layer
            normalizes, (n, 2, C); None if `needs_products` is False.
    """

    moments: Moments
    state: Tensor
    products: Tensor | None

    @property
    def count(self) -> Tensor:
        """Number of tokens, (n, 1), at least 1."""
        return self.moments.count.clamp(min=1)


def needs_products(layer: BatchStatisticsNorm) -> bool:
    """Return whether the parts depend on the output's gradient, as all but PowerNorm's do."""
    return not isinstance(layer, PowerNorm)


def state_of(layer: BatchStatisticsNorm) -> Tensor:
    """Return the state that the next forward uses, (k, C) float64 on the device."""
    if isinstance(layer, PowerNorm):
        rows = [
            layer.running_second_moment,
            layer.to_loss(layer.running_gradient_moment),
            _filled(layer, layer.stage),
        ]
    else:
        rows = [_filled(layer, 1.0) if layer.weight is None else layer.weight]
    if isinstance(layer, ProgressiveRepBatchNorm):
        rows[0] = rows[0] * (1 - layer.share)  # RepBN gets this share of the gradient
    if isinstance(layer, BatchRenorm):
        max_r = layer._limits(layer.num_batches_tracked)[0]
        rows += [layer.running_var, max_r.expand(layer.num_features)]
    if isinstance(layer, MovingAverageBatchNorm):
        rows += [
            layer.running_second_moment,
            layer.window_second_moment[1:].sum(0),
            layer.to_loss(layer.window_gradient_moment[1:].sum(0)),
            _filled(layer, layer.stage),
        ]
    if isinstance(layer, UnifiedNorm):
        rows += [
            layer.running_second_moment,
            layer.to_loss(layer.running_gradient_moment),
            layer.to_loss(layer.window_gradient_moment[1:].sum(0)),
            _filled(layer, layer.stage),
            *layer.window_second_moment,
        ]
    return torch.stack([row.detach().double() for row in rows])


def _filled(layer: BatchStatisticsNorm, value: float) -> Tensor:
    return layer.num_batches_tracked.new_full((layer.num_features,), value, dtype=torch.float64)


def part_norms(layer: BatchStatisticsNorm, calls: Calls) -> tuple[Tensor | None, Tensor]:
    """Return the squared norms of the parts over the tokens of each call.

    Args:
        layer: a layer, of which only the settings are read.
        calls: calls, with products if the layer needs them.

    Returns:
        (g_μ, g_σ²) or, for a layer that does not center, (None, g_ψ²): (n,) each. PowerNorm's,
        MABN's and UnifiedNorm's g_ψ² is the term of their surrogate backward, `ν x̂/ψ`.
    """
    if isinstance(layer, PowerNorm):
        return None, _power_norm(layer, calls)
    assert calls.products is not None
    if isinstance(layer, MovingAverageBatchNorm):
        return None, _moving_average(layer, calls, calls.products)
    if isinstance(layer, UnifiedNorm):
        return None, _unified(layer, calls, calls.products)
    return _exact(layer, calls, calls.products)


def _exact(
    layer: BatchStatisticsNorm, calls: Calls, products: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return the parts of BatchNorm, RegularizedBatchNorm (no penalty), BatchRenorm, PowerNormV."""
    count = calls.count
    square = calls.moments.var if layer.centered else calls.moments.second_moment
    rstd = reciprocal_root(square, layer.eps, layer.floor)
    scale = calls.state[:, 0]
    if isinstance(layer, BatchRenorm):
        ratio = 1 / (rstd * (calls.state[:, 1] + layer.eps).sqrt())
        limit = calls.state[:, 2]
        scale = scale * torch.minimum(torch.maximum(ratio, 1 / limit), limit)
    total, with_input = products.unbind(1)
    if layer.centered:
        with_input = with_input - calls.moments.mean * total
    along = scale * with_input * rstd / count  # mean of g x̂
    if layer.floor:  # a variance below the floor has no gradient
        along = torch.where(square >= layer.eps, along, 0.0)
    through_root = (along.square() * rstd.square() * rstd.square() * square * count).sum(-1)
    if not layer.centered:
        return None, through_root
    mean = scale * total / count
    return (mean.square() * rstd.square() * count).sum(-1), through_root


def _power_norm(layer: PowerNorm, calls: Calls) -> Tensor:
    running, nu, stage = calls.state.unbind(1)
    batch = calls.moments.second_moment
    used = running
    if layer.max_ratio is not None:
        bound = layer.max_ratio**2
        used = torch.minimum(torch.maximum(running, batch / bound), batch * bound)
    used = torch.where(stage == 0, batch, used)
    for_gradient = batch if layer.variant == "released" else used
    squares = nu.square() * batch * calls.moments.count
    return (squares / ((used + layer.eps) * (for_gradient + layer.eps))).sum(-1)


def _moving_average(layer: MovingAverageBatchNorm, calls: Calls, products: Tensor) -> Tensor:
    weight, running, window_squares, history, stage = calls.state.unbind(1)
    batch = calls.moments.second_moment
    used = torch.where(stage == 0, batch, (window_squares + batch) / layer.window)
    root = (used + layer.eps).sqrt()
    ratio = (root / (running + layer.eps).sqrt()).clamp(1 / RATIO_LIMIT, RATIO_LIMIT)
    ratio = torch.where(stage == 2, ratio, 1.0)
    current = weight * ratio * products[:, 1] / (root * calls.count)
    moment = torch.where(stage == 0, current, (history + current) / layer.window)
    return (moment.square() * batch * calls.moments.count / root**4).sum(-1)


def _unified(layer: UnifiedNorm, calls: Calls, products: Tensor) -> Tensor:
    weight, running, nu, history, stages = calls.state[:, :5].unbind(1)
    batch = calls.moments.second_moment
    windows = calls.state[:, 5:]
    acting = [layer.acting_in(int(stage)) for stage in stages[:, 0]]
    skips = [
        is_left_out(window, one, now.filters)
        for window, one, now in zip(windows, batch, acting, strict=True)
    ]
    skip = torch.stack(skips).unsqueeze(1)

    def column(name: str) -> Tensor:
        return torch.tensor([[getattr(now, name)] for now in acting], device=skip.device)

    means = geometric_mean(torch.cat([windows[:, 1:], batch.unsqueeze(1)], 1).transpose(0, 1))
    used = torch.where(skip | column("own_forward"), batch, means)
    root = (used + layer.eps).sqrt()
    ratio = (root / (running + layer.eps).sqrt()).clamp(1 / RATIO_LIMIT, RATIO_LIMIT)
    ratio = torch.where(column("ratio") & ~skip, ratio, 1.0)
    current = weight * ratio * products[:, 1] / (root * calls.count)
    size = layer.windows[1]
    moment = torch.where(column("own_backward") | skip, current, (history + current) / size)
    moment = torch.where(skip, moment, torch.lerp(nu, moment, layer.backward_weight))
    return (moment.square() * batch * calls.moments.count / root**4).sum(-1)
