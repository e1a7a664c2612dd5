"""Running a case on a backend and comparing it with its formula."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from powernorm.norms.base import Norm
from powernorm.norms.kernel_check.cases import Case
from powernorm.norms.kernel_check.formulas import Truth, solve
from powernorm.norms.kernel_check.inputs import (
    Inputs,
    gradient_laid_out,
    laid_out,
    magnification,
    make_inputs,
    make_problem,
    mask_laid_out,
    taken_back,
)
from powernorm.norms.regularized import RegularizedBatchNorm
from powernorm.ops.dispatch import Backend, unfit_reason, use_backend

ALLOWED: Final = 32
"""Rounding errors that a result may be off; see `_rounding_errors` for the size of one."""

_MOST: Final = 1e30


@dataclass
class Outcome:
    """One case on one backend.

    Attributes:
        case: the case.
        backend: what computed it.
        errors: largest error of each result, in units of its rounding errors.
        problems: what is wrong, by result; empty where all is right.
    """

    case: Case
    backend: Backend
    errors: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return the case, its errors and its problems."""
        return {
            "backend": self.backend,
            **self.case.facts(),
            "errors": self.errors,
            "problems": self.problems,
        }


@dataclass
class Reference:
    """The numbers of a case and what its formula makes of them."""

    case: Case
    inputs: Inputs
    truth: Truth


def reference(case: Case) -> Reference:
    """Draw the numbers of a case, and compute its formula in float64."""
    inputs = make_inputs(case)
    truth = solve(case.setting.norm, make_problem(case, inputs))
    hidden = _hidden(case, inputs)
    if inputs.grad_total is not None:
        arriving = inputs.grad_total.double().masked_fill(hidden, 0.0)
        truth.values["gradient of x"] = truth.values["gradient of x"] + arriving
    if inputs.residual is not None:
        total = inputs.total.double().masked_fill(hidden, 0.0)
        truth.values["sum"] = total.expand_as(truth.values["y"])
        truth.values["gradient of residual"] = truth.values["gradient of x"]
    return Reference(case, inputs, truth)


def _hidden(case: Case, inputs: Inputs) -> Tensor:
    """Return which positions, (tokens, 1), a released variant sets to 0 before anything else."""
    hides = case.setting.norm in ("bn", "rbn", "pnv") and case.setting.is_released
    return ~inputs.valid.unsqueeze(1) & hides


def why_not(case: Case, backend: Backend, device: torch.device) -> str:
    """Return why a backend does not serve a case, `""` where it does."""
    kind = torch.float32 if case.residual == "float32" else case.torch_dtype
    return unfit_reason(backend, torch.empty(1, case.width, dtype=kind, device=device))


def check_case(ref: Reference, backend: Backend, device: torch.device) -> Outcome:
    """Let a backend compute a case, twice, and compare.

    The second call is of the same layer in the same state: backends may prepare what repeats.
    """
    outcome = Outcome(ref.case, backend)
    layer = deepcopy(ref.inputs.layer).to(device)
    before = deepcopy(layer.state_dict())
    try:
        with use_backend(backend):
            got = _results(ref, layer, device)
            layer.load_state_dict(before)
            layer.zero_grad()
            again = _results(ref, layer, device)
    except Exception as error:  # whatever a kernel raises is a finding
        outcome.problems["call"] = f"raises {type(error).__name__}: {error}"
        return outcome
    _compare(ref, got, outcome)
    for name, value in got.items():
        if not _same_bits(value, again[name]):
            outcome.problems.setdefault(name, "differs between two equal calls")
    return outcome


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(value: Tensor) -> Tensor:
    return torch.empty(value.numel(), dtype=value.dtype).copy_(value.flatten()).view(torch.uint8)


def _results(ref: Reference, layer: Norm, device: torch.device) -> dict[str, Tensor]:
    """Call the layer forward and backward; its results by name, on the CPU."""
    case, inputs = ref.case, ref.inputs
    x = laid_out(case, inputs.x.to(device)).requires_grad_()
    residual = None
    if inputs.residual is not None:
        residual = laid_out(case, inputs.residual.to(device)).requires_grad_()
    mask = None if inputs.mask is None else mask_laid_out(case, inputs.mask.to(device))
    with warnings.catch_warnings():
        # Cases that are all padding are meant to be.
        warnings.filterwarnings("ignore", "padding_mask of shape .* is True everywhere")
        outputs = layer(x, mask, residual)
    y, total = outputs if isinstance(outputs, tuple) else (outputs, None)
    results = {"y": y} if total is None else {"y": y, "sum": total}
    pairs = [(y, inputs.grad_y), (total, inputs.grad_total)]
    arriving = [(o, gradient_laid_out(case, g.to(device))) for o, g in pairs if g is not None]
    if isinstance(layer, RegularizedBatchNorm) and layer.training:
        penalty = layer.penalty()
        results["penalty"] = penalty.reshape(1)
        arriving.append((penalty, torch.ones_like(penalty)))
    torch.autograd.backward([o for o, _ in arriving], [g for _, g in arriving])
    leaves = {"x": x, "residual": residual, **dict(layer.named_parameters())}
    for name, leaf in leaves.items():
        if leaf is not None and leaf.grad is not None:
            results[f"gradient of {name}"] = leaf.grad
    results |= dict(layer.named_buffers())
    return {name: value.detach().cpu().clone() for name, value in results.items()}


def _compare(ref: Reference, got: Mapping[str, Tensor], outcome: Outcome) -> None:
    problems = outcome.problems
    expected = _expected_types(ref)
    for name, kind in expected.items():
        if name not in got:
            problems[name] = "is missing"
        elif got[name].dtype != kind:
            problems[name] = f"is of {got[name].dtype}, expected {kind}"
    for name, count in ref.truth.counters.items():
        if int(got[name]) != count:
            problems[name] = f"is {int(got[name])}, expected {count}"
    for name in expected:
        if name in got:
            _compare_values(ref, name, got[name], outcome)


def _expected_types(ref: Reference) -> dict[str, torch.dtype]:
    """Return the types of all results that the call must have, by name."""
    inputs, layer = ref.inputs, ref.inputs.layer
    types = {"y": inputs.total.dtype}
    if inputs.residual is not None:
        types["sum"] = inputs.total.dtype
    if ref.case.tokens:  # an input without elements may be left without a gradient
        types["gradient of x"] = inputs.x.dtype
        types |= {} if inputs.residual is None else {"gradient of residual": inputs.residual.dtype}
    for name, parameter in layer.named_parameters():
        # A gradient that arrives at the sum alone does not go through γ and β.
        if parameter.requires_grad and inputs.grad_y is not None:
            types[f"gradient of {name}"] = parameter.dtype
    if "penalty" in ref.truth.values and ref.case.values != "one NaN":
        types["penalty"] = ref.case.wide_dtype
    buffers = {k: v.dtype for k, v in layer.named_buffers() if v.is_floating_point()}
    return types | buffers


def _compare_values(ref: Reference, name: str, got: Tensor, outcome: Outcome) -> None:
    samples = ref.truth.values[name]
    if _is_matrix(name):
        expected_shape = laid_out(ref.case, ref.inputs.x).shape
        if got.shape != expected_shape:
            text = f"has shape {tuple(got.shape)}, expected {tuple(expected_shape)}"
            outcome.problems[name] = text
            return
        got = taken_back(ref.case, got)
    kind = got.dtype
    exact, unit = samples[0], _rounding_errors(samples, kind, ref.case)
    if "gradient of" in name and _is_matrix(name) and ref.inputs.grad_total is not None:
        # The sum of two gradients, each of which may have been rounded to the type before.
        unit = unit + ref.inputs.grad_total.double().abs() * (torch.finfo(kind).eps / 2)
    compared = _comparable(ref, name, exact) & (exact.abs() < torch.finfo(kind).max / 2)
    if not compared.any():
        return
    error = (got.double() - exact).abs()
    if not bool(got[compared].isfinite().all()):
        outcome.problems[name] = f"is not finite{_first(compared & ~got.isfinite())}"
        return
    units = torch.where(compared, error / unit, 0.0).clamp(max=_MOST)
    outcome.errors[name] = float(units.max())
    if units.max() > ALLOWED:
        outcome.problems[name] = _told(units, got, exact)


def _told(units: Tensor, got: Tensor, exact: Tensor) -> str:
    flat = int(units.argmax())
    wrong = int((units > ALLOWED).sum())
    return (
        f"is {float(got.flatten()[flat]):.9g}, expected {float(exact.flatten()[flat]):.9g}, "
        f"{float(units.max()):.3g} rounding errors off, {ALLOWED} are allowed"
        f"{_first(units == units.max())}; {wrong} of {units.numel()} values are wrong"
    )


def _first(where: Tensor) -> str:
    place = where.nonzero()[0].tolist()
    names = ("token", "feature") if len(place) == 2 else ("feature",)
    return " at " + ", ".join(f"{n} {i}" for n, i in zip(names, place, strict=True))


def _is_matrix(name: str) -> bool:
    return name in ("y", "sum", "gradient of x", "gradient of residual")


def _comparable(ref: Reference, name: str, exact: Tensor) -> Tensor:
    """Return which values of a result are determined, as a mask of its shape."""
    case, compared = ref.case, torch.ones_like(exact, dtype=torch.bool)
    if name in ("y", "sum") and case.padding == "NaN" and ref.inputs.mask is not None:
        compared = compared & ~ref.inputs.mask.unsqueeze(1)
    if case.values == "one NaN" and (_is_matrix(name) or "gradient of" in name):
        compared[..., 0] = False
    return compared


def _rounding_errors(samples: Tensor, kind: torch.dtype, case: Case) -> Tensor:
    """Return the size of a rounding error of each value of a result.

    That is half a unit in the last place of the value in its type, plus what rounding the
    intermediate results of its formula changes, in the type that kernels compute in. The latter is
    a random number for each value: it counts with what is usual in its token and its feature.

    Args:
        samples: (samples, tokens, C) or (samples, C), the first one exact.
        kind: type of the result.
        case: whose result it is.
    """
    exact, limits = samples[0], torch.finfo(kind)
    changes = (samples[1:] - exact).nan_to_num(0, 0, 0) / magnification(case)
    if case.dtype == "float64":
        changes = 4 * changes  # the formula has rounding errors of its own
    spread = changes.square().mean(0)
    usual = spread.mean()
    if exact.ndim == 2 and exact.numel():
        usual = spread.mean(0) * spread.mean(1, keepdim=True) / usual.clamp(min=1e-300)
    own = exact.abs().nan_to_num(0, 0, 0) * limits.eps / 2 + limits.smallest_normal * limits.eps
    return own + torch.maximum(spread, usual).sqrt()
