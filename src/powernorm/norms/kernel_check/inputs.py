"""The layer and the tensors of a case, and the same numbers as its formula reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from powernorm.norms.base import Norm
from powernorm.norms.kernel_check.cases import LARGEST, Case
from powernorm.norms.kernel_check.formulas import Problem
from powernorm.norms.kernel_check.rounding import Rounding
from powernorm.norms.registry import build_norm

_NAN_FEATURE = 0
"""Feature whose values hold a NaN where a case has one."""
_FEW_SAMPLES: Final = 1 + 5
_MANY_SAMPLES: Final = 1 + 12


@dataclass
class Inputs:
    """The numbers of a case, rounded to the types of the tensors that hold them.

    Attributes:
        x: (tokens, C) in the case's type.
        residual: (tokens, C), or None.
        mask: (tokens,) bool, True = padding, or None.
        grad_y: (tokens, C) in the output's type, or None where no gradient arrives.
        grad_total: the same for the sum with the residual.
        layer: on the CPU, in the state before the call.
    """

    x: Tensor
    residual: Tensor | None
    mask: Tensor | None
    grad_y: Tensor | None
    grad_total: Tensor | None
    layer: Norm

    @property
    def total(self) -> Tensor:
        """What is normalized, as torch adds it."""
        return self.x if self.residual is None else self.x + self.residual

    @property
    def valid(self) -> Tensor:
        """(tokens,) bool."""
        return torch.ones(len(self.x), dtype=torch.bool) if self.mask is None else ~self.mask


def make_inputs(case: Case) -> Inputs:
    """Draw the numbers of a case."""
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + case.index)
    mask = _mask(case, generator)
    x = _values(case, generator).to(case.torch_dtype)
    residual = None
    if case.residual != "none":
        kind = torch.float32 if case.residual == "float32" else case.torch_dtype
        residual = _noise(case, generator).to(kind)
    hidden = None if case.padding == "in the loss" else mask
    if hidden is not None and case.padding == "NaN":
        x[hidden] = float("nan")
        x[hidden.nonzero()[::2, 0]] = float("inf")
    if case.values == "one NaN":
        x[_first_valid(mask), _NAN_FEATURE] = float("nan")
    out = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    grads = [_gradient(case, generator, hidden).to(out) for _ in range(2)]
    grad_y = None if case.arriving == "sum only" else grads[0]
    has_total = residual is not None and case.arriving != "output only"
    layer = _layer(case, generator)
    return Inputs(x, residual, mask, grad_y, grads[1] if has_total else None, layer)


def make_problem(case: Case, inputs: Inputs) -> Problem:
    """Return the same numbers in float64, with samples in front."""
    # What is usual in a token and a feature is not seen where there is but one of them, or where
    # each group of few features is its own case.
    is_narrow = min(case.tokens, case.width) < 4 or case.groups > 1
    samples = _MANY_SAMPLES if is_narrow else _FEW_SAMPLES
    if case.tokens * case.width > LARGEST:
        samples = 1 + 1  # there are enough tokens and features to tell what is usual
    total = inputs.total.double()
    if inputs.mask is not None and case.padding == "NaN":
        # What padding holds is to make no difference.
        total = torch.where(inputs.mask.unsqueeze(1), 0.0, total)
    layer = inputs.layer
    grad = torch.zeros_like(total) if inputs.grad_y is None else inputs.grad_y.double()
    buffers = dict(layer.named_buffers())
    return Problem(
        options=_options(case),
        training=case.setting.training,
        total=_leaf(total, samples),
        valid=inputs.valid.unsqueeze(1),
        weight=_vector(getattr(layer, "weight", None), samples),
        bias=_vector(getattr(layer, "bias", None), samples),
        cotangent=grad,
        state={k: v.double() for k, v in buffers.items() if v.is_floating_point()},
        tracked=int(buffers.get("num_batches_tracked", 0)),
        nonfinite=int(buffers.get("num_nonfinite_batches", 0)),
        rounding=Rounding(torch.finfo(case.wide_dtype).eps * magnification(case), case.index),
        storing=Rounding(torch.finfo(case.torch_dtype).eps * magnification(case), case.index),
    )


def magnification(case: Case) -> float:
    """Return how many times too large the rounding errors of the formula are made.

    The formula is computed in float64, where errors of the size of its own would vanish in these.
    """
    return 64.0 if case.dtype == "float64" else 1.0


def laid_out(case: Case, values: Tensor) -> Tensor:
    """Return (tokens, C) in the shape and strides of the case's layout."""
    tokens, width = values.shape
    rows = max(n for n in range(1, 9) if tokens % n == 0)
    batch = (rows, tokens // rows, width)
    match case.layout:
        case "batch":
            return values.reshape(batch).clone()
        case "rows apart":
            return torch.cat([values, values], 1)[:, :width]
        case "features apart":
            return torch.stack([values, values], -1)[..., 0]
        case "transposed":
            return values.reshape(batch).transpose(0, 1).contiguous().transpose(0, 1)
        case "dim 1":
            return values.reshape(batch).transpose(1, 2).contiguous()
        case "channels":
            return values.reshape(*batch[:2], 1, width).movedim(-1, 1)
        case _:
            return values.clone()


def taken_back(case: Case, values: Tensor) -> Tensor:
    """Return a tensor of the case's layout as (tokens, C)."""
    if case.layout in ("dim 1", "channels"):
        values = values.movedim(1, -1)
    return values.reshape(-1, case.width)


def mask_laid_out(case: Case, mask: Tensor) -> Tensor:
    """Return (tokens,) in the shape of the layout's positions, with gaps between the elements."""
    shape = laid_out(case, torch.empty(len(mask), case.width)).shape
    positions = shape[:-1] if case.layout not in ("dim 1", "channels") else (shape[0], *shape[2:])
    mask = mask.reshape(positions)
    return mask if case.layout == "flat" else torch.stack([mask, ~mask], -1)[..., 0]


def gradient_laid_out(case: Case, grad: Tensor) -> Tensor:
    """Return a gradient of an output as it arrives there."""
    arriving = laid_out(case, grad).contiguous()
    if case.arriving == "strided":
        return torch.stack([arriving, arriving], -1)[..., 0]
    if case.arriving == "constant" and case.padding == "in the loss" and grad.numel():
        return grad[0, 0].expand(arriving.shape)  # as of y.sum()
    return arriving


def _options(case: Case) -> dict[str, Any]:
    options = dict(case.setting.options)
    if case.groups:
        options["groups"] = case.groups
    return options


def _layer(case: Case, generator: torch.Generator) -> Norm:
    options = _options(case)
    if case.layout in ("dim 1", "channels"):
        options["feature_dim"] = 1
    kind = torch.float32 if case.affine == "float32" else case.torch_dtype
    options["affine"] = case.affine != "none"
    layer = build_norm(case.setting.norm, case.width, dtype=kind, **options)
    if not case.setting.training:
        layer.eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            around = 1.0 if name == "weight" else 0.0
            parameter.copy_(around + 0.3 * _randn(generator, case.width))
            parameter.requires_grad_(case.affine != "frozen")
        for name, buffer in layer.named_buffers():
            _fill(case, name, buffer, generator)
    return layer


def _fill(case: Case, name: str, buffer: Tensor, generator: torch.Generator) -> None:
    """Give a buffer some value that it may have in a training."""
    if name == "num_batches_tracked":
        buffer.fill_(case.setting.tracked)
    elif name == "num_nonfinite_batches":
        buffer.fill_(case.setting.tracked // 3)
    elif name == "running_mean":
        buffer.copy_(_randn(generator, *buffer.shape) + (100 if case.values == "offset" else 0))
    elif "gradient" in name:
        buffer.copy_(0.3 * _randn(generator, *buffer.shape))
    else:
        buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _noise(case: Case, generator: torch.Generator) -> Tensor:
    return _randn(generator, case.tokens, case.width)


def _values(case: Case, generator: torch.Generator) -> Tensor:
    x = _noise(case, generator) + 0.3
    if case.values == "offset":
        return x + 100
    if case.values == "scales":  # of features and of tokens
        for shape in ((1, case.width), (case.tokens, 1)):
            x = x * 10 ** (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    if case.values == "constant":
        x[:, -1] = 3.3
        if not case.setting.is_released:  # 1/eps without spread
            x[-1:] = 0.7
    return x


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    tokens = case.tokens
    match case.mask:
        case "none":
            return None
        case "all":
            return torch.ones(tokens, dtype=torch.bool)
        case "one valid":
            which = int(torch.randint(max(tokens, 1), (), generator=generator))
            return torch.arange(tokens) != which
        case "prefix":
            rows = max(n for n in range(1, 9) if tokens % n == 0)
            lengths = torch.randint(0, tokens // rows + 1, (rows, 1), generator=generator)
            return (torch.arange(tokens // rows) >= lengths).flatten()
        case _:
            return torch.rand(tokens, generator=generator) < 0.4


def _first_valid(mask: Tensor | None) -> Tensor:
    return torch.zeros(1, dtype=torch.long) if mask is None else (~mask).nonzero()[:1, 0]


def _gradient(case: Case, generator: torch.Generator, hidden: Tensor | None) -> Tensor:
    grad = _noise(case, generator)
    if case.arriving == "constant" and hidden is None and grad.numel():
        grad = grad[0, 0].expand(grad.shape)
    return grad if hidden is None else grad.masked_fill(hidden.unsqueeze(1), 0.0)


def _leaf(value: Tensor, samples: int) -> Tensor:
    return value.expand(samples, *value.shape).clone().requires_grad_()


def _vector(value: object, samples: int) -> Tensor | None:
    if not isinstance(value, Tensor):
        return None
    return _leaf(value.detach().double().unsqueeze(0), samples)
