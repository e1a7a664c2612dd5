"""`norm(x, mask, residual)`: the sum and its norm in one call."""

from __future__ import annotations

import pytest
import torch

import powernorm
from cases import CASES, Case, case_id, states
from covering import some_default
from powernorm.ops import use_backend
from refusals import refuses

every_case = pytest.mark.parametrize("case", CASES, ids=case_id)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.thinned
@every_case
@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_is_the_norm_of_the_sum(case: Case, backend: str, training: bool, masked: bool) -> None:
    """Outputs, gradients (the stream's too) and statistics, over several steps."""
    fused, plain = (case.build(dtype=torch.float64).train(training) for _ in range(2))
    for seed in range(3):
        x, stream = (noise(3, 5, 8, seed=10 * seed + i).requires_grad_() for i in range(2))
        x2, stream2 = (t.detach().clone().requires_grad_() for t in (x, stream))
        mask = noise(3, 5, seed=seed) < -0.5 if masked else None
        grads = [noise(3, 5, 8, seed=50 + i) for i in range(2)]
        with use_backend(backend):  # type: ignore[arg-type]
            y, total = fused(x, mask, stream)
            torch.autograd.backward((y, total), grads)
        total2 = x2 + stream2
        y2 = plain(total2, mask)
        torch.autograd.backward((y2, total2), grads)
        released = case.options.get("variant") == "released" and case.stateful
        seen = slice(None) if mask is None or not released else ~mask
        torch.testing.assert_close(y, y2)
        torch.testing.assert_close(total[seen], total2[seen])
        torch.testing.assert_close(x.grad[seen], x2.grad[seen])
        torch.testing.assert_close(stream.grad[seen], stream2.grad[seen])
    for (name, a), b in zip(fused.named_parameters(), plain.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=name)
    for name, value in states(fused).items():
        torch.testing.assert_close(value, plain.get_buffer(name))


@every_case
def test_only_the_stream_is_used(case: Case) -> None:
    """A loss that looks at the sum alone gives the sum's gradient."""
    norm = case.build()
    x, stream = noise(4, 8).float().requires_grad_(), noise(4, 8, seed=1).float().requires_grad_()
    _, total = norm(x, None, stream)
    total.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))
    torch.testing.assert_close(stream.grad, torch.ones_like(x))


def test_residual_of_another_shape() -> None:
    norm = powernorm.PowerNorm(8)
    refuses(r"residual has shape \(3, 8\)", norm, torch.zeros(4, 8), None, torch.zeros(3, 8))
    with pytest.raises(powernorm.InputError, match=r"dtype torch.int64, expected"):
        norm(torch.zeros(4, 8), None, torch.zeros(4, 8, dtype=torch.long))


@pytest.mark.parametrize("name", ["pn", "bn", "mabn", "adanorm", "rms", "ln", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_a_wider_stream_stays_wide(name: str, training: bool) -> None:
    """Under autocast a branch comes in bfloat16; the sum is what `branch + stream` gives."""
    norms = [powernorm.build_norm(name, 8).train(training) for _ in range(2)]
    linear = torch.nn.Linear(8, 8)
    x, stream = noise(6, 8).float(), noise(6, 8, seed=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        branch = linear(x)
        assert branch.dtype == torch.bfloat16
        y, total = norms[0](branch, None, stream)
        wanted_total = branch + stream
        wanted = norms[1](wanted_total)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, wanted_total)
    torch.testing.assert_close(y, wanted)
    (y.sum() + total.sum()).backward()
    assert linear.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", some_default(["pn", "bn", "rbn", "adanorm", "rms"], "pn", "rms"))
def test_compiled(name: str) -> None:
    norms = [powernorm.build_norm(name, 8, dtype=torch.float64) for _ in range(2)]
    compiled = torch.compile(lambda x, r: norms[0](x, None, r), fullgraph=True)
    for seed in range(3):
        inputs = [noise(6, 8, seed=2 * seed + i).requires_grad_() for i in range(2)]
        again = [t.detach().clone().requires_grad_() for t in inputs]
        for result, leaves in (
            (compiled(*inputs), inputs),
            (norms[1](again[0], None, again[1]), again),
        ):
            (result[0].sin() + result[1].cos()).sum().backward()
            assert all(t.grad is not None for t in leaves)
        for a, b in zip(inputs, again, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_bfloat16_normalizes_the_rounded_sum() -> None:
    """The norm's input is the sum as it is stored, not a wider one."""
    norm = powernorm.RMSNorm(64)
    x, stream = noise(7, 64).bfloat16(), (noise(7, 64, seed=1) * 30).bfloat16()
    y, total = norm(x, None, stream)
    assert torch.equal(total, x + stream)
    torch.testing.assert_close(y, norm(total))
