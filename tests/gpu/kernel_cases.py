"""Seeded data for the Triton programs, and their comparison with the reference in float64."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from powernorm.ops import eager as reference
from powernorm.ops.batch_norm import BatchNormArgs, BatchNormBackwardArgs
from powernorm.ops.power_norm import PowerNormArgs, PowerNormBackwardArgs
from powernorm.ops.static_norm import StaticNormArgs, StaticNormBackwardArgs
from powernorm.ops.token_norm import TokenNormArgs, TokenNormBackwardArgs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_kernels() -> ModuleType:
    """The package under test, for a GPU where there is one, else for Triton's interpreter.

    Triton reads the environment while it is imported, which another test's libraries may have
    caused already: then its own functions are defined once more. The environment is left alone,
    because it also decides which backend the norms choose.
    """
    if DEVICE == "cpu":
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            import triton.language

            if isinstance(triton.language.sum, triton.JITFunction):
                importlib.reload(triton.language.standard)
                importlib.reload(triton.language)
            return importlib.import_module("powernorm.ops.kernels.triton")
    return importlib.import_module("powernorm.ops.kernels.triton")


kernels = load_kernels()

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDTHS = {1: (0, 1), 3: (0, 1, 3), 17: (0, 1), 64: (0, 1, 4, 16)}
MASKS = (None, "some", "all", "one valid")


class Case:
    """A seeded choice of data: type, sizes, mask, groups, residual, γ and β, strides, offset."""

    def __init__(self, seed: int, device: str = DEVICE, **fixed: Any) -> None:
        choose = random.Random(seed)
        axes: dict[str, Sequence[Any]] = {
            "dtype": FLOATS,
            "width": tuple(WIDTHS),
            "tokens": (0, 1, 2, 37, 37),
            "mask": MASKS,
            "residual": (False, True),
            "affine": ("none", "weight", "both", "other type"),
            "strided": (False, True),
            "offset": (0.0,),
        }
        picked = {name: fixed.get(name, choose.choice(values)) for name, values in axes.items()}
        self.dtype, self.width, self.tokens = picked["dtype"], picked["width"], picked["tokens"]
        self.groups = fixed.get("groups", choose.choice(WIDTHS.get(self.width, (0, 1))))
        self.offset, self.strided = picked["offset"], picked["strided"]
        self.device, self.choose = device, choose
        self.group_name = ""
        self.generator = torch.Generator().manual_seed(seed)
        self.mask = self._mask(picked["mask"])
        self.x = self.array() + self.offset
        if self.mask is not None and choose.random() < 0.5:
            self.x[self.mask] = float("nan")
        self.residual = self.array() if picked["residual"] else None
        other = torch.bfloat16 if self.dtype == torch.float32 else torch.float32
        kind = other if picked["affine"] == "other type" else self.dtype
        self.weight = None if picked["affine"] == "none" else self.vector(0.5, kind)
        has_bias = picked["affine"] in ("both", "other type")
        self.bias = self.vector(-1.0, kind) if has_bias else None
        self.mean, self.var = self.vector(-1.0), self.vector(0.5)
        self.grad_y = self.array()
        if self.mask is not None and self.x.isnan().any():
            self.grad_y[self.mask] = 0
        self.grad_total = None if self.residual is None else self.array()

    @property
    def is_single(self) -> bool:
        """Is there one valid token?"""
        return self.tokens == 1 or (self.mask is not None and int((~self.mask).sum()) == 1)

    def pick(self, *values: Any) -> Any:
        return self.choose.choice(values)

    def _mask(self, kind: str | None) -> Tensor | None:
        if kind is None:
            return None
        shares = {"some": 0.3, "all": 2.0, "one valid": 2.0}
        mask = torch.rand(self.tokens, generator=self.generator) < shares[kind]
        if kind == "one valid":
            mask[-1:] = False
        return mask.to(self.device)

    def array(self) -> Tensor:
        columns = self.width + 16 * self.strided
        values = torch.randn(self.tokens, columns, generator=self.generator)
        return values.to(self.device, self.dtype)[:, : self.width]

    def vector(self, low: float, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.rand(self.width, generator=self.generator) + low
        return values.to(self.device, dtype)


def wide(args: Any) -> Any:
    """The same arguments in float64."""
    return type(args)(
        *(
            value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in args
        )
    )


def check(case: Case, name: str, args: Any, exact_args: Any = None) -> tuple[Any, Any]:
    """Compare a function with the reference in float64; errors up to twice the eager one's.

    Args:
        case: gives the type.
        name: of the function.
        args: its arguments.
        exact_args: of the float64 run, where they are not the same.

    Returns:
        Outputs of the eager reference and of the float64 run.
    """
    before = [value.clone() for value in args if isinstance(value, Tensor)]
    # The interpreter computes with numpy, which warns about NaN where a GPU does not.
    with np.errstate(all="ignore"):
        ours = getattr(kernels, name)(args)
    after = [value for value in args if isinstance(value, Tensor)]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    eager = getattr(reference, name)(args)
    exact = getattr(reference, name)(wide(args if exact_args is None else exact_args))
    returned = eager, exact
    assert [value is None for value in ours] == [value is None for value in eager]
    ours, eager, exact = (
        [value for value in values if value is not None] for values in (ours, eager, exact)
    )
    storages = [output.untyped_storage().data_ptr() for output in ours if output.numel()]
    assert len(set(storages)) == len(storages)
    for index, (mine, theirs, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), index
        assert mine.is_contiguous()
        compare(mine, theirs, truth, case, f"output {index}")
    return returned


def compare(mine: Tensor, theirs: Tensor, truth: Tensor, case: Case, name: str) -> None:
    defined = truth.isfinite() & theirs.isfinite()
    assert mine[defined].isfinite().all(), name
    undefined = truth.isnan() & theirs.isnan()
    assert mine[undefined].isnan().all(), name
    if not defined.any():
        return
    truth = truth[defined].double()
    eps = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    # Of a single token all but eps cancels.
    floor = 32 * eps * max(float(truth.abs().max()), 400.0 if case.is_single else 1.0)
    error = float((mine[defined].double() - truth).abs().max())
    eager_error = float((theirs[defined].double() - truth).abs().max())
    assert error <= 2 * eager_error + floor, (name, error, eager_error, floor)


def check_batch(case: Case) -> None:
    centered = case.pick(True, True, False)
    limits = torch.tensor([1.2, 0.3], device=case.device) if centered else None
    limits = case.pick(limits, None)
    eps, floor = case.pick((1e-5, False), (0.3, True))
    mean = case.mean if centered else None
    affine = case.mask, case.weight, case.bias
    args = BatchNormArgs(
        case.x, case.residual, *affine, mean, case.var, None, limits, case.groups, eps, floor,
        case.group_name,
    )  # fmt: skip
    eager, exact = check(case, "batch_norm", args)
    grad_statistics = case.pick(None, torch.ones_like(eager.statistics))

    def backward(forward: Any) -> BatchNormBackwardArgs:
        inputs = case.x if case.residual is None else forward.total
        given = (case.grad_y, case.grad_total, grad_statistics, inputs, case.mask, case.weight)
        known = (forward.scales, forward.statistics, eps, floor, centered, case.group_name)
        return BatchNormBackwardArgs(*given, *known)

    check(case, "batch_norm_backward", backward(eager), backward(exact))


def check_power(case: Case) -> None:
    use_batch, max_ratio, released = case.pick(
        (False, 0.0, False), (False, 0.0, False), (False, 0.0, True), (True, 0.0, False),
        (True, 0.0, True), (False, 1.2, False), (True, 1.2, False),
    )  # fmt: skip
    affine = case.mask, case.weight, case.bias
    args = PowerNormArgs(
        case.x, case.residual, *affine, case.var, case.mean, None, case.groups, 1e-5, use_batch,
        max_ratio, released, case.group_name,
    )  # fmt: skip
    eager, exact = check(case, "power_norm", args)

    def backward(forward: Any) -> PowerNormBackwardArgs:
        inputs = case.x if case.residual is None else forward.total
        given = (case.grad_y, case.grad_total, inputs, case.mask, case.weight)
        known = (forward.scales, forward.statistics, forward.sums, released)
        return PowerNormBackwardArgs(*given, *known)

    check(case, "power_norm_backward", backward(eager), backward(exact))


def check_static(case: Case) -> None:
    mean = case.pick(case.mean, None)
    eps, floor = case.pick((1e-5, False), (0.8, True))
    affine = case.weight, case.bias
    args = StaticNormArgs(case.x, case.residual, *affine, mean, case.var, case.groups, eps, floor)
    eager, exact = check(case, "static_norm", args)

    def backward(forward: Any) -> StaticNormBackwardArgs:
        inputs = case.x if case.residual is None else forward.total
        given = (case.grad_y, case.grad_total, inputs, case.weight)
        return StaticNormBackwardArgs(*given, forward.scales, forward.statistics)

    check(case, "static_norm_backward", backward(eager), backward(exact))


def check_token(case: Case) -> None:
    groups = max(case.groups, 1)
    centered = case.pick(True, True, False)
    released = centered and case.width // groups > 1 and case.pick(True, False)
    scale, k = case.pick((1.0, 0.0), (1.0, 0.1), (2.0, 0.1))
    detach = case.pick((False, False), (True, False), (False, True), (True, True))
    affine = case.pick(True, True, False)
    settings = groups, centered, 1e-5, released, scale, k
    args = TokenNormArgs(case.x, case.residual, case.weight, case.bias, *settings, *detach)
    eager, exact = check(case, "token_norm", args)

    def backward(forward: Any) -> TokenNormBackwardArgs:
        inputs = case.x if case.residual is None else forward.total
        given = (case.grad_y, case.grad_total, inputs, case.weight, forward.statistics)
        return TokenNormBackwardArgs(*given, centered, released, scale, k, *detach, affine)

    check(case, "token_norm_backward", backward(eager), backward(exact))


CHECKS = (check_batch, check_power, check_static, check_token)
