"""Ways past the kernels: transforms, tracing, higher derivatives, odd tensors and devices."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.ops.batch_norm import BatchNormArgs, batch_norm
from powernorm.ops.static_norm import StaticNormArgs, static_norm
from powernorm.ops.token_norm import TokenNormArgs, token_norm
from refusals import refuses

# torch's own: its forward-mode decompositions are scripted when they are first used
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
TOKEN_NORMS = ("rms", "adanorm", "ln-simple", "gn")
STATIC = ("bn", "pn-only", "pn")


def trained(name: str, features: int = 8) -> nn.Module:
    """A norm in evaluation, with statistics that are not those of the start."""
    norm = powernorm.build_norm(name, features, dtype=torch.float64)
    if name in STATIC:
        norm(noise(30, features) * 3 + 1).sum().backward()
    return norm.eval()


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def in_torch(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same function, on eager torch."""

    def call(x: Tensor) -> Tensor:
        with powernorm.ops.use_backend("eager"):
            y: Tensor = norm(x)
        return y

    return call


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [*TOKEN_NORMS, *STATIC, "pnv", "rbn", "brn", "mabn", "dyt"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_stack_of_gradients(name: str, training: bool, backend: Any) -> None:
    """A whole Jacobian by one backward, as of `torch.autograd.functional.jacobian`."""
    norm = trained(name).train(training)
    x, z, stack = noise(6, 8, seed=1), noise(6, 8, seed=2), noise(2, 3, 6, 8, seed=3)
    x.requires_grad_()
    with powernorm.ops.use_backend(backend):
        results = norm(x, residual=z)
        found = torch.autograd.grad(
            results, x, tuple(stack), retain_graph=True, is_grads_batched=True
        )
        for i, grad in enumerate(found[0]):
            one = torch.autograd.grad(results, x, tuple(stack[:, i]), retain_graph=True)
            torch.testing.assert_close(grad, *one)


# ---- higher derivatives ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TOKEN_NORMS, *STATIC])
def test_a_graph_of_the_gradient_changes_no_gradient(name: str) -> None:
    """A norm that is used twice, so that its γ is used before itself."""
    norm = trained(name)
    x, z = noise(6, 8, seed=1).requires_grad_(), noise(6, 8, seed=2)
    sources = [x, *norm.parameters()]
    f = (norm(torch.tanh(norm(x))) * z).sum()
    plain = torch.autograd.grad(f, sources, retain_graph=True)
    with_graph = torch.autograd.grad(f, sources, create_graph=True)
    torch.testing.assert_close(with_graph, plain)


@pytest.mark.parametrize("name", [*TOKEN_NORMS, *STATIC])
def test_a_gradient_penalty_with_a_residual(name: str) -> None:
    norm = trained(name)
    x, r = noise(6, 8, seed=1).requires_grad_(), noise(6, 8, seed=2).requires_grad_()

    def penalty(fused: bool) -> tuple[Tensor, ...]:
        total = x + r
        y, total = norm(x, None, r) if fused else (norm(total), total)
        loss = (y.pow(2) * total).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, r])

    torch.testing.assert_close(penalty(True), penalty(False))


@pytest.mark.parametrize("name", ["rms", "gn", "bn"])
def test_second_derivatives(name: str) -> None:
    norm = trained(name)
    x = noise(5, 8, seed=1).requires_grad_()
    r = noise(5, 8, seed=2).requires_grad_()
    assert torch.autograd.gradgradcheck(norm, (x,))
    assert torch.autograd.gradgradcheck(lambda a, b: norm(a, None, b), (x, r))


# ---- transforms and tracing --------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TOKEN_NORMS, *STATIC])
@pytest.mark.parametrize("residual", [False, True])
def test_transforms(name: str, residual: bool) -> None:
    norm = trained(name)
    x, tangent, r = (noise(6, 8, seed=seed) for seed in range(3))

    def call(value: Tensor) -> Tensor:
        return norm(value, None, r)[0] if residual else norm(value)

    leaf = x.clone().requires_grad_()
    call(leaf).backward(tangent)
    _, pull = torch.func.vjp(call, x)
    torch.testing.assert_close(pull(tangent)[0], leaf.grad)
    y, moved = torch.func.jvp(call, (x,), (tangent,))
    torch.testing.assert_close(y, call(x))
    step = 1e-6
    expected = (call(x + step * tangent) - call(x - step * tangent)) / (2 * step)
    if name != "adanorm":  # whose gradient is not its derivative, on purpose
        torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-5)
    each = torch.func.vmap(torch.func.grad(lambda v: call(v)[0].sum()))
    assert each(x.expand(3, 6, 8)).shape == (3, 6, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        _, again = torch.autograd.forward_ad.unpack_dual(call(dual))
    torch.testing.assert_close(again, moved)


@pytest.mark.parametrize("name", ["bn", "rbn", "pnv", "pn", "brn", "mabn"])
def test_training_by_batch_statistics_refuses_transforms(name: str) -> None:
    norm = powernorm.build_norm(name, 8, dtype=torch.float64)
    x = noise(6, 8)
    for transform in (
        lambda: torch.func.jvp(norm, (x,), (x,)),
        lambda: torch.func.grad(lambda v: norm(v).sum())(x),
    ):
        refuses(r"torch\.func", transform)
    assert int(norm.num_batches_tracked) == 0


@pytest.mark.parametrize("name", ["rms", "bn", "pn"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced(name: str) -> None:
    norm = trained(name).float()
    x = noise(6, 8).float()
    traced = torch.jit.trace(norm, (x,))
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    saved.seek(0)
    torch.testing.assert_close(torch.jit.load(saved)(2 * x), norm(2 * x))


# ---- tensors that are not what they seem -------------------------------------------------------


@pytest.mark.parametrize("name", ["rms", "bn", "pn"])
def test_negative_views(name: str) -> None:
    norm = trained(name)
    x = noise(6, 8)
    torch.testing.assert_close(norm(torch._neg_view(x)), norm(-x))
    leaf = x.clone().requires_grad_()
    norm(leaf).backward(torch._neg_view(noise(6, 8, seed=1)))
    other = x.clone().requires_grad_()
    norm(other).backward(-noise(6, 8, seed=1))
    torch.testing.assert_close(leaf.grad, other.grad)


def test_a_gradient_of_zeros_that_is_not_there() -> None:
    norm = trained("rms")
    x = noise(6, 8).requires_grad_()
    norm(x).backward(torch._efficientzerotensor((6, 8), dtype=torch.float64))
    assert not x.grad.any()


def test_tensors_elsewhere_are_named() -> None:
    x = torch.randn(6, 4)
    meta = torch.empty(4, device="meta")
    mask = torch.zeros(6, dtype=torch.bool, device="meta")
    settings = 0, 1e-5, False
    for call, name in (
        (lambda: token_norm(TokenNormArgs(x, None, meta, None)), "weight"),
        (lambda: token_norm(TokenNormArgs(x, None, torch.ones(2), None)), "weight"),
        (lambda: powernorm.RMSNorm(4, device="meta")(x), "weight"),
        (lambda: token_norm(TokenNormArgs(x, x.to("meta"), None, None)), "residual"),
        (lambda: token_norm(TokenNormArgs(x, x[:1], None, None)), "residual"),
        (
            lambda: batch_norm(
                BatchNormArgs(x, None, mask, None, None, None, x[0], None, None, *settings, "")
            ),
            "padding_mask",
        ),
        (
            lambda: static_norm(
                StaticNormArgs(x, None, None, None, None, torch.ones(1), *settings)
            ),
            "var",
        ),
    ):
        refuses(rf"^{name} has shape .*, expected", call)


@pytest.mark.parametrize("name", ["bn", "pn", "rbn", "rms", "adanorm"])
def test_a_default_device_does_not_move_what_is_on_the_cpu(name: str) -> None:
    norm = powernorm.build_norm(name, 8)
    x = torch.randn(6, 8, requires_grad=True)
    with torch.device("meta"):
        norm(x).sum().backward()
    assert x.grad.device.type == "cpu"
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ["bn", "rbn", "pnv", "pn", "brn"])
def test_narrow_buffers(name: str) -> None:
    """From a checkpoint taken in as it is, or cast by somebody else: never written as float32."""
    norm = powernorm.build_norm(name, 64)
    narrow = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in norm.state_dict().items()
    }
    norm.load_state_dict(narrow, assign=True)
    floats = [b for b in norm.buffers() if b.is_floating_point()]
    assert all(b.dtype == torch.float32 for b in floats)
    norm(torch.randn(50, 64)).sum().backward()
    cast = powernorm.build_norm(name, 64)
    for key, buffer in list(cast.named_buffers()):
        if buffer.is_floating_point():
            cast._buffers[key] = buffer.bfloat16()
    for _ in range(3):
        cast(torch.randn(50, 64) * 5).sum().backward()
    assert int(cast.num_batches_tracked) == 3
    moved = [b for b in cast.buffers() if b.is_floating_point()]
    assert all(b.dtype == torch.bfloat16 and b.isfinite().all() for b in moved)
