"""A check of the backends against eager torch in float64: `powernorm doctor`.

The allowed error of a result is twice the error of eager torch in the same type, plus a few
roundings; for eager torch itself only the roundings. The tests show that the eager references
compute the papers' definitions.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from powernorm.norms.base import Norm
from powernorm.norms.registry import build_norm
from powernorm.norms.regularized import RegularizedBatchNorm
from powernorm.ops.dispatch import Backend, missing_reason, unfit_reason, use_backend

_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ROUNDINGS: Final = 32
"""Allowed error in roundings of the largest value, besides eager torch's own error."""
_INTERPRETED_ELEMENTS: Final = 400
"""Largest input for Triton's interpreter, which gets float32 only."""


class Setting(NamedTuple):
    """A norm, its options, and the number of its training steps before the call."""

    norm: str
    options: Mapping[str, Any] = {}
    tracked: int = 20
    """Number of batches that its running statistics have seen."""
    training: bool = True


class Input(NamedTuple):
    """A kind of input."""

    shape: tuple[int, ...]
    mask: str = "some"
    """none, some, all, one valid, or NaN: some, and padding holds NaN."""
    residual: str = "none"
    """none, same, or float32: the stream of a model in half precision."""
    affine: str = "float32"
    """same, or float32: the parameters of a layer in a model in half precision."""
    feature_dim: int = -1
    strided: bool = False
    """Whether the input is not contiguous."""


_INPUTS: Final = (
    Input((3, 7, 16)),
    Input((20, 16), mask="none", affine="same", strided=True),
    Input((2, 7, 12), mask="all", residual="same"),
    Input((2, 7, 12), mask="one valid"),
    Input((0, 8), mask="none"),
    Input((4, 9, 48), mask="NaN"),
    Input((5, 60, 516), residual="same", affine="same"),
    Input((1, 37, 4100)),
    Input((3, 700, 20), residual="float32"),
    Input((2, 64, 9, 5), feature_dim=1),
)
_QUICK_INPUT: Final = Input((3, 7, 18))
_QUICK_SETTINGS: Final = (
    *(Setting(name) for name in ("bn", "pn", "adanorm")),
    Setting("bn", training=False),
)
"""One setting for each op that has kernels."""
_RELEASED: Final[dict[str, Any]] = {"variant": "released"}
_PENALTIES: Final[dict[str, Any]] = {"mean_penalty": 0.5, "var_penalty": 0.2}
_RENORM: Final = {"max_r": 1.5, "max_d": 0.5, "warmup_steps": 5, "ramp_steps": 4}
_STATEFUL: Final = ("bn", "rbn", "brn", "mabn", "pnv", "pn", "pn-only", "pn-static")
_SETTINGS: Final = (
    *(Setting(name) for name in ("ln", "ln-simple", "detach", "adanorm", "rms", "bn", "pnv")),
    *(Setting(name, {"groups": 4}) for name in ("gs", "gn", "bn")),
    Setting("ln-simple", _RELEASED),
    *(Setting("detach", {name: False}) for name in ("detach_mean", "detach_std")),
    Setting("adanorm", {"scale": 2.0, "k": 0.3, **_RELEASED}),
    *(Setting("bn", options) for options in ({"momentum": None}, {"start": "torch"}, _RELEASED)),
    *(Setting("rbn", _PENALTIES | options) for options in ({}, _RELEASED)),
    *(Setting("rbn", _PENALTIES | {"penalty": one}) for one in ("diff2", "relative", "jeffreys")),
    *(Setting("brn", _RENORM, tracked) for tracked in (4, 6, 20)),
    Setting("pnv", {"groups": 4, **_RELEASED}),
    *(Setting("pn", {"warmup_steps": 9}, tracked) for tracked in (3, 9, 10)),
    Setting("pn", {"warmup_steps": 9, "groups": 4}),
    Setting("pn", {"warmup_steps": 0, "decay": "floored"}),
    *(Setting("pn", {"warmup_steps": 5} | options) for options in ({"max_ratio": 1.2}, _RELEASED)),
    Setting("pn-only", {"warmup_steps": 5, "backward_momentum": 0.2}),
    Setting("pn-static", {"warmup_steps": 5}),
    *(Setting(name, training=False) for name in _STATEFUL),
    Setting("bn", _RELEASED, training=False),
)


class Case(NamedTuple):
    """A call of a norm on an input of a type."""

    setting: Setting
    input: Input
    dtype: torch.dtype

    def kind(self, wanted: str) -> torch.dtype:
        """Return the type of a tensor: the input's, or float32 beside a narrow one."""
        return torch.float32 if wanted == "float32" and self.dtype.itemsize == 2 else self.dtype


@dataclass
class Outcome:
    """A case on a backend: the largest error over the allowed one, and failures by result."""

    case: Case
    backend: Backend
    error: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)


def quick_cases() -> list[Case]:
    """Return one call of each op with kernels in each type."""
    return list(itertools.starmap(Case, itertools.product(_QUICK_SETTINGS, [_QUICK_INPUT], _TYPES)))


def select_cases() -> list[Case]:
    """Return the calls to check, the same ones every time."""
    every = itertools.starmap(Case, itertools.product(_SETTINGS, _INPUTS, _TYPES))
    return [case for case in every if case.input.mask != "NaN" or _ignores_padding(case.setting)]


def _ignores_padding(setting: Setting) -> bool:
    # Evaluation reads no mask, and released PowerNorm averages gradient moments over padding.
    return setting.training and not (setting.norm == "pn" and "variant" in setting.options)


def run_cases(cases: Iterable[Case], backends: Iterable[Backend]) -> list[Outcome]:
    """Run the cases on those backends that this machine has.

    If a launch finds that a backend cannot run here, its outcomes are left out, and
    `missing_reason` has the reason.
    """
    here = [name for name in backends if not missing_reason(name)]
    outcomes = [
        outcome
        for case in (cases if here else ())
        if (able := [name for name in here if takes(name, case)])
        for outcome in check_case(case, able)
    ]
    return [outcome for outcome in outcomes if not missing_reason(outcome.backend)]


def takes(backend: Backend, case: Case) -> bool:
    """Return whether a case is run on a backend."""
    is_large = torch.Size(case.input.shape).numel() > _INTERPRETED_ELEMENTS
    if _is_interpreted(backend) and (is_large or case.dtype != torch.float32):
        return False
    x = torch.empty(1, 1, dtype=case.kind(case.input.residual), device=_device_of(backend))
    return not unfit_reason(backend, x)


def _is_interpreted(backend: Backend) -> bool:
    return backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def _device_of(backend: Backend) -> str:
    return "cuda" if backend == "triton" and not _is_interpreted(backend) else "cpu"


class _Drawn(NamedTuple):
    """A layer after some training steps, and the arguments of a call."""

    layer: Norm
    x: Tensor
    residual: Tensor | None
    mask: Tensor | None
    grads: list[Tensor]
    """Gradients of the output, and of the sum with the residual."""


def _draw(case: Case) -> _Drawn:
    given, generator = case.input, torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    positions = list(given.shape)
    width = positions.pop(given.feature_dim)
    hidden = torch.rand(positions, generator=generator) < 0.4
    if given.mask in ("all", "one valid"):
        hidden.fill_(True)
        hidden.view(-1)[:1] = given.mask == "all"
    residual = None
    if given.residual != "none":
        residual = noise(*given.shape).to(case.kind(given.residual))
    x = (noise(*given.shape) + 1).to(case.dtype)
    kind = x.dtype if residual is None else residual.dtype
    grads = [noise(*given.shape).to(kind) for _ in range(1 if residual is None else 2)]
    if given.mask == "NaN":
        rows = hidden.unsqueeze(given.feature_dim)
        x, grads = x.masked_fill(rows, torch.nan), [grads[0].masked_fill(rows, 0.0)]
    if given.strided:
        x = torch.stack([x, x], -1)[..., 0]
    options = {"dtype": case.kind(given.affine), **case.setting.options}
    layer = build_norm(case.setting.norm, width, feature_dim=given.feature_dim, **options)
    layer.train(case.setting.training)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(0.3 * noise(width) + (name == "weight"))
        for name, buffer in layer.named_buffers():
            if not buffer.is_floating_point():
                buffer.fill_(case.setting.tracked if name == "num_batches_tracked" else 1)
            elif name == "running_mean" or "gradient" in name:
                buffer.copy_(0.3 * noise(*buffer.shape) + ("mean" in name))
            else:
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return _Drawn(layer, x, residual, None if given.mask == "none" else hidden, grads)


def _call(given: _Drawn, backend: Backend, wide: bool = False) -> dict[str, Tensor]:
    """Call a layer forward and backward; return its results and state by name, on the CPU."""
    device = _device_of(backend)

    def placed(x: Tensor) -> Tensor:
        x = x.double() if wide else x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    layer = deepcopy(given.layer).to(device)
    layer = layer.double() if wide else layer
    leaves = {"x": placed(given.x).requires_grad_(), **dict(layer.named_parameters())}
    if given.residual is not None:
        leaves["residual"] = placed(given.residual).requires_grad_()
    mask = None if given.mask is None else given.mask.to(device)
    with use_backend(backend), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "padding_mask of shape .* is True everywhere")
        found = layer(leaves["x"], mask, leaves.get("residual"))
        outputs = found if isinstance(found, tuple) else (found,)
        results = dict(zip(("y", "sum"), outputs, strict=False))
        grads = [placed(grad) for grad in given.grads]
        if isinstance(layer, RegularizedBatchNorm) and layer.training:
            results["penalty"] = layer.penalty()
            grads.append(torch.ones_like(results["penalty"]))
        torch.autograd.backward([*results.values()], grads)
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            results[f"gradient of {name}"] = leaf.grad
    results |= dict(layer.named_buffers())
    return {name: value.detach().cpu().clone() for name, value in results.items()}


def check_case(case: Case, backends: list[Backend]) -> list[Outcome]:
    """Run a case on the backends and compare with eager torch in float64.

    Each backend runs it twice from the same state, because kernels may prepare repeated calls.
    """
    drawn, outcomes = _draw(case), [Outcome(case, backend) for backend in backends]
    for outcome in outcomes:
        backend = outcome.backend
        try:
            exact, eager = _call(drawn, "eager", wide=True), _call(drawn, "eager")
            ours, again = (_call(drawn, backend) for _ in range(2))
        except Exception as error:  # any error of a kernel is reported
            outcome.problems["call"] = f"raises {type(error).__name__}: {error}"
            continue
        for name, wanted in exact.items():
            problem = _compare(outcome, ours.get(name), eager[name], wanted)
            if not problem and not _same_bits(ours[name], again[name]):
                problem = "differs between two equal calls"
            if problem:
                outcome.problems[name] = problem
    return outcomes


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (one, other)))


def _compare(outcome: Outcome, got: Tensor | None, eager: Tensor, exact: Tensor) -> str:
    """Return what is wrong with a result, `""` if it is right; record its error."""
    if got is None or (got.shape, got.dtype) != (eager.shape, eager.dtype):
        found = "missing" if got is None else f"{got.dtype} of shape {tuple(got.shape)}"
        return f"is {found}, expected {eager.dtype} of shape {tuple(eager.shape)}"
    if not torch.equal(got.isfinite(), finite := exact.isfinite()):
        return "differs from the reference in which values are finite"
    if not finite.any():
        return ""
    wanted = exact[finite].double()
    error, allowed = (float((x[finite].double() - wanted).abs().max()) for x in (got, eager))
    if outcome.backend == "eager":
        allowed = 0.0
    # Kernels compute in the wide type, and round outputs of a narrow one once.
    wide = torch.float64 if outcome.case.dtype == torch.float64 else torch.float32
    narrow = torch.finfo(got.dtype).eps if got.is_floating_point() and got.itemsize == 2 else 0.0
    roundings = _ROUNDINGS * torch.finfo(wide).eps + 2 * narrow
    limit = 2 * allowed + roundings * (1 + float(wanted.abs().max()))
    outcome.error = max(outcome.error, error / limit)
    return "" if error <= limit else f"has an error of {error:.2g}, {limit:.2g} is allowed"
