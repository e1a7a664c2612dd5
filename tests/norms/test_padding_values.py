"""Padding reaches no gradient without a loss on it: NaN there has the same effect as 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import powernorm
from cases import CASES, Case, case_id
from powernorm.ops.dispatch import use_functions

GARBAGE = (float("nan"), float("inf"), float("-inf"))
MASK = torch.tensor(
    [[False, False, True, False, True, True], [False, True, False, False, True, False]]
)


@pytest.fixture(params=["cpu", "eager", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every backend; Triton's programs through its interpreter where there is no GPU."""
    if request.param != "triton":
        with powernorm.ops.use_backend(request.param):
            yield
        return
    pytest.importorskip("triton")
    from gpu.kernel_cases import DEVICE, kernels

    if DEVICE != "cpu":
        pytest.skip("the kernels of this process are compiled for the GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # The interpreter computes with numpy, which warns about NaN where a GPU does not.
    with use_functions(kernels), np.errstate(all="ignore"):
        yield


def noise(seed: int) -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed)) * 2 + 0.3


def padded_with(x: Tensor, *values: float) -> Tensor:
    """The input with these values in its padding, a token each in turn."""
    filled = x.clone()
    for index, (row, column) in enumerate(MASK.nonzero().tolist()):
        value = values[index % len(values)]
        filled[row, column] = value
        if index % 2:  # one feature alone
            filled[row, column, 1:] = x[row, column, 1:]
    return filled


Results = dict[str, Tensor]


def steps(
    norm: nn.Module,
    inputs: Callable[[int], Tensor],
    *,
    residual: bool = False,
    call: Any = None,
) -> Results:
    """The gradients of some training steps, and what they leave in the buffers."""
    results: Results = {}
    for t in range(2):
        x = inputs(t).requires_grad_()
        stream = noise(20 + t).requires_grad_() if residual else None
        outputs = (norm if call is None else call)(x, MASK, stream)
        outputs = outputs if residual else (outputs,)
        arriving = [noise(10 + t).masked_fill(MASK.unsqueeze(-1), 0.0) for _ in outputs]
        norm.zero_grad()
        torch.autograd.backward(outputs, arriving)
        assert x.grad is not None
        results[f"x {t}"] = x.grad
        results[f"y {t}"] = outputs[0].detach()[~MASK]
        if stream is not None:
            assert stream.grad is not None
            results[f"residual {t}"] = stream.grad
        results |= {
            f"{name} {t}": p.grad for name, p in norm.named_parameters() if p.grad is not None
        }
    return results | dict(norm.named_buffers())


def averages_over_padding(case: Case) -> bool:
    """Two released forms do; PowerNorm's counts a batch with NaN there as not finite."""
    return case.name in ("pn", "un") and case.options.get("variant") == "released"


OWN_SCALES = ("seednorm", "scalenorm", "biasnorm", "gatednorm")
"""Without the option `affine`."""


@pytest.mark.thinned(1)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "case", [case for case in CASES if not averages_over_padding(case)], ids=case_id
)
def test_nothing_reaches_a_gradient(case: Case, residual: bool) -> None:
    expected = steps(case.build(), lambda t: padded_with(noise(t), 0.0), residual=residual)
    got = steps(case.build(), lambda t: padded_with(noise(t), *GARBAGE), residual=residual)
    torch.testing.assert_close(got, expected)


@pytest.mark.thinned(1)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [("bn", {}), ("pnv", {}), ("pn", {}), ("pn-only", {}), ("bn", {"groups": 4})],
)
def test_nothing_reaches_a_gradient_of_frozen_statistics(
    name: str, options: dict[str, Any], residual: bool
) -> None:
    """As where a pretrained model is tuned by its running statistics."""

    def frozen() -> nn.Module:
        norm = Case(name, options).build()
        norm(noise(5)).square().sum().backward()
        norm.freeze_statistics()
        return norm

    expected = steps(frozen(), lambda t: padded_with(noise(t), 0.0), residual=residual)
    got = steps(frozen(), lambda t: padded_with(noise(t), *GARBAGE), residual=residual)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "name",
    [
        *("ln", "rms", "gn", "gs", "adanorm", "dyt", "none"),
        *OWN_SCALES,
    ],
)
@pytest.mark.usefixtures("backend")
def test_a_loss_that_looks_at_padding_counts_it(name: str) -> None:
    """Gradients are those of the formula as torch differentiates it, where values are finite."""
    norm = Case(name, {} if name in OWN_SCALES else {"affine": True}).build()
    x, arriving = noise(0), noise(1)
    arriving[0, 0] = 0.0
    arriving[1, :, 3] = 0.0
    parameters = dict(norm.named_parameters())

    def plain(parameters: Results, x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(norm, parameters, (x,))
        return y

    _, pull = torch.func.vjp(plain, {k: p.detach() for k, p in parameters.items()}, x)
    expected, expected_x = pull(arriving)
    leaf = x.clone().requires_grad_()
    norm(leaf, MASK).backward(arriving)
    torch.testing.assert_close(leaf.grad, expected_x, rtol=1e-4, atol=1e-5)
    grads = {name: p.grad for name, p in parameters.items()}
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_layer_norm_is_torchs_own_in_evaluation() -> None:
    norm, x = Case("ln").build(), noise(0)
    own = nn.functional.layer_norm(x, (8,), norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(norm(x), own)
    y = norm(padded_with(x, *GARBAGE), MASK)
    torch.testing.assert_close(y[~MASK], own[~MASK])
    assert torch.equal(norm.eval()(x), own)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layer_norm_is_recomputed_alike_outside_of_the_scope(reentrant: bool) -> None:
    """The backward runs a checkpointed forward again when the scope of the mask is closed."""
    grads = []
    for wrapped in (False, True):
        norm, leaf = Case("ln").build(), noise(0).requires_grad_()
        with powernorm.padding_mask(MASK):
            y = checkpoint(norm, leaf, use_reentrant=reentrant) if wrapped else norm(leaf)
        y.square().sum().backward()
        grads.append((leaf.grad, norm.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_mask_of_the_scope_counts_as_well() -> None:
    norm = Case("ln").build()
    leaf = padded_with(noise(0), *GARBAGE).requires_grad_()
    with powernorm.padding_mask(MASK):
        norm(leaf)[~MASK].sum().backward()
    assert leaf.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in norm.parameters())


class Stack(nn.Module):
    """All norms whose gradients are not left to a mask, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        names = ("ln", "rms", "gn", "gs", "adanorm", "dyt", "none")
        self.norms = nn.ModuleList(Case(name, {"affine": True}).build() for name in names)

    def forward(self, x: Tensor, mask: Tensor, _: None) -> Tensor:
        for norm in self.norms:
            x = norm(x, mask)
        return x


def test_compiled() -> None:
    torch._dynamo.reset()
    eager, net = Stack(), Stack()
    expected = steps(eager, lambda t: padded_with(noise(t), 0.0))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    got = steps(net, lambda t: padded_with(noise(t), *GARBAGE), call=compiled)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["ln", "rms", "gn", "dyt", "none"])
def test_a_gradient_penalty(name: str) -> None:
    """Derivatives of the derivative keep to the rule: those of NaN and of 0 are the same."""

    def penalty(value: float) -> tuple[Tensor, ...]:
        norm = Case(name, {"affine": True}).build()
        x = padded_with(noise(0), value).requires_grad_()
        loss = norm(x, MASK)[~MASK].square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (x, *norm.parameters()), allow_unused=True)

    torch.testing.assert_close(penalty(float("nan")), penalty(0.0))
