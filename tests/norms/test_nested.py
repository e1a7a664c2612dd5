"""A jagged nested tensor has the same results as the padded batch with its padding mask."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from cases import CASES, STATEFUL, Case, case_id
from covering import some_default
from powernorm.diagnosis import NormMonitor
from powernorm.norms import nested
from powernorm.norms.adapted import AdaptedNorm
from refusals import refuses

LENGTHS = (3, 1, 4, 0, 2)
STEPS = 4
COUNTS_PADDING = (("pn", "released"), ("un", "released"))
"""The published PowerNorm averages its gradient moments over padding too: there is none here."""


def counts_padding(case: Case) -> bool:
    return (case.name, case.options.get("variant")) in COUNTS_PADDING


def jagged(values: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def with_holes(padded: Tensor) -> Tensor:
    """The same sequences where they lie in a padded tensor, as torch.nested.narrow gives them."""
    batch, length, features = padded.shape
    return torch.nested.nested_tensor_from_jagged(
        padded.reshape(batch * length, features),
        torch.arange(batch + 1) * length,
        torch.tensor(LENGTHS),
    )


def padding() -> Tensor:
    return torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]


def valid(nested: Tensor) -> Tensor:
    return torch.cat([one.reshape(-1, 8) for one in nested.unbind()])


def train(
    norm: nn.Module, call: Callable[[nn.Module, Tensor, Tensor | None], Any], dtype: torch.dtype
) -> list[Tensor]:
    """Outputs, input gradients, parameter gradients and buffers of some steps."""
    generator = torch.Generator().manual_seed(0)
    seen = []
    for step in range(STEPS):
        shape = (len(LENGTHS), max(LENGTHS), 8)
        x, residual, cotangent = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
        )
        x = (x * (1 + step) + 0.5).to(dtype).requires_grad_()
        y, total = call(norm, x, residual.to(dtype))
        kept = cotangent.to(dtype)[~padding()]
        ((y * kept).sum() + (total * kept.flip(0)).sum()).backward()
        seen += [y.detach(), total.detach(), x.grad[~padding()]]
    return [*seen, *(p.grad for p in norm.parameters()), *norm.buffers()]


def padded_call(norm: nn.Module, x: Tensor, residual: Tensor) -> Any:
    y, total = norm(x, padding(), residual)
    return y[~padding()], total[~padding()]


def packed_call(norm: nn.Module, x: Tensor, residual: Tensor) -> Any:
    nested = jagged(x[~padding()])
    y, total = norm(nested, None, jagged_like(residual[~padding()], nested))
    return valid(y + nested - nested), valid(total)


def holes_call(norm: nn.Module, x: Tensor, residual: Tensor) -> Any:
    # What lies between the sequences must not count, whatever it is.
    x = x.masked_fill(padding().unsqueeze(-1), float("inf"))
    nested = with_holes(x)
    flat = residual.reshape(-1, 8)
    others = torch.nested.nested_tensor_from_jagged(flat, nested.offsets(), nested.lengths())
    y, total = norm(nested, None, others)
    return valid(y), valid(total)


def jagged_like(values: Tensor, nested: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, nested.offsets())


@pytest.mark.thinned(1)
@pytest.mark.parametrize("call", [packed_call, holes_call])
@pytest.mark.parametrize("case", [c for c in CASES if not counts_padding(c)], ids=case_id)
def test_equals_the_padded_batch(case: Case, call: Any) -> None:
    got = train(case.build(dtype=torch.float64), call, torch.float64)
    expected = train(case.build(dtype=torch.float64), padded_call, torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["bn", "pn", "rms"])
def test_low_precision(name: str) -> None:
    got = train(powernorm.build_norm(name, 8), packed_call, torch.bfloat16)
    expected = train(powernorm.build_norm(name, 8), padded_call, torch.bfloat16)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_evaluation_without_gradients(case: Case) -> None:
    norm = case.build().eval()
    x = torch.randn(sum(LENGTHS), 8)
    with torch.no_grad():
        y = norm(jagged(x))
        assert y.is_nested
        torch.testing.assert_close(y.values(), norm(x))


def test_gradient_of_a_nested_leaf_is_nested() -> None:
    norm = powernorm.BatchNorm(8)
    parts = [torch.randn(length, 8) for length in LENGTHS]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    (norm(x) + x).values().square().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_sequences_behind_other_dimensions() -> None:
    """Heads before the sequences: (batch, heads, j, features)."""
    x = torch.randn(sum(LENGTHS), 2, 8)
    heads = jagged(x).transpose(1, 2)
    y = powernorm.BatchNorm(8)(heads)
    assert y.shape == heads.shape
    torch.testing.assert_close(y.transpose(1, 2).values(), powernorm.BatchNorm(8)(x))


def test_masks_of_a_scope_are_for_padded_tensors() -> None:
    """A model that nests its input inside is called under the mask of the padded one."""
    x = torch.randn(sum(LENGTHS), 8)
    adapted = AdaptedNorm(nn.Sequential(powernorm.BatchNorm(8)), 8)
    for norm in (powernorm.BatchNorm(8), powernorm.PowerNorm(8), adapted):
        alone = norm(jagged(x)).values()
        with powernorm.padding_mask(torch.ones(5, 4, dtype=torch.bool)):
            torch.testing.assert_close(norm(jagged(x)).values(), alone)


@pytest.mark.parametrize(
    ("norm", "arguments", "message"),
    [
        ({"feature_dim": 1}, (jagged(torch.zeros(10, 8)),), "build the layer with feature_dim=-1"),
        ({}, (jagged(torch.zeros(10, 8)).transpose(1, 2),), r"transpose it to \(batch, j, C\)"),
        ({}, (jagged(torch.zeros(10, 6)),), r"built for 8 features .* \(5, j\d+, 6\)"),
        (
            {},
            (jagged(torch.zeros(10, 8)), torch.zeros(5, 4, dtype=torch.bool)),
            r"padding_mask of shape \(5, 4\): .* leave the mask out",
        ),
        ({}, (jagged(torch.zeros(10, 8)), None, torch.zeros(10, 8)), "from the same offsets"),
        (
            {},
            (jagged(torch.zeros(10, 8)), None, jagged(torch.zeros(10, 8), (2, 2, 2, 2, 2))),
            "from the same offsets",
        ),
        ({}, (torch.zeros(5, 2, 8), None, jagged(torch.zeros(10, 8))), "residual has shape"),
    ],
)
def test_refused_by_name(norm: dict[str, Any], arguments: Any, message: str) -> None:
    for build in (powernorm.BatchNorm, powernorm.RMSNorm):
        refuses(message, build(8, **norm), *arguments)


@pytest.mark.filterwarnings("ignore:.*prototype stage")
def test_the_other_layout_is_refused_by_name() -> None:
    x = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)])
    message = "layout torch.strided, .*: build it by .*layout=torch.jagged"
    for call in (lambda: powernorm.BatchNorm(8)(x), lambda: powernorm.diagnose(models()[0], [x])):
        refuses(message, call)


@pytest.mark.parametrize("name", some_default(["bn", "pn"]))
def test_compiled(name: str) -> None:
    """One graph for batches of any lengths."""
    eager, norm = (powernorm.build_norm(name, 8) for _ in range(2))
    compiled = torch.compile(norm, fullgraph=True)
    for lengths in ((3, 1, 4), (2, 2, 5), (1, 6, 2)):
        results = []
        for call in (eager, compiled):
            values = torch.linspace(-3, 5, sum(lengths) * 8).reshape(-1, 8).sin()
            x = jagged(values, lengths).requires_grad_()
            y = call(x).values()
            (y**3).sum().backward()
            results.append((y, x.grad.values()))
        torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close([*eager.buffers()], [*norm.buffers()])


class Residual(nn.Module):
    """A model that is as happy with nested tensors as with padded ones."""

    def __init__(self, norm: Callable[[int], nn.Module], middle: nn.Module) -> None:
        super().__init__()
        self.first, self.linear, self.last = norm(8), middle, norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.linear(self.first(x)))


def models(kind: int = 0) -> list[Residual]:
    torch.manual_seed(0)
    # Neither the Linear nor the LayerNorm of torch goes backward with holes.
    middle = nn.Identity() if kind else nn.Linear(8, 8)
    released = lambda size: powernorm.BatchNorm(size, variant="released")  # noqa: E731
    return [Residual(norm, middle) for norm in (nn.LayerNorm, powernorm.BatchNorm, released)]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, 8, generator=generator) * 2 + 1 for _ in range(3)]


def masked(model: nn.Module, batch: Tensor) -> Any:
    with powernorm.padding_mask(padding()):
        return model(batch)


def nest(batch: Tensor) -> list[Tensor]:
    return [jagged(batch[~padding()]), with_holes(batch)]


@pytest.mark.parametrize("kind", [0, 1], ids=["packed", "holes"])
def test_diagnose_and_calibrate_see_the_tokens(kind: int) -> None:
    nested = [nest(batch)[kind] for batch in batches()]
    for a, b in zip(models(kind), models(kind), strict=True):
        rows = powernorm.diagnose(a, nested).rows
        for row, expected in zip(rows, powernorm.diagnose(b, batches(), masked).rows, strict=True):
            assert row.mean_tid == pytest.approx(expected.mean_tid)
            assert row.var_tid == pytest.approx(expected.var_tid)
            assert row.padded_mean_tid is None  # what padding would do is not known
    norms, others = models(kind)[1], models(kind)[1]
    powernorm.calibrate(norms, nested)
    powernorm.calibrate(others, batches(), masked)
    torch.testing.assert_close([*norms.buffers()], [*others.buffers()])


@pytest.mark.parametrize("kind", [0, 1], ids=["packed", "holes"])
def test_monitor_sees_tokens_and_gradients(kind: int) -> None:
    for model, other in zip(models(kind)[kind:], models(kind)[kind:], strict=True):
        monitors = NormMonitor(model, 1), NormMonitor(other, 1)
        rows = []
        for monitor, one in zip(monitors, (model, other), strict=True):
            monitor.start_step(1)
            if one is model:
                y = valid(one(nest(batches()[0])[kind]))
            else:
                y = masked(one, batches()[0])[~padding()]
            y.pow(3).sum().backward()
            rows.append(monitor.finish_step(1))
        for mine, theirs in zip(*rows, strict=True):
            for key, value in theirs.items():
                number = isinstance(value, float)
                near = pytest.approx(value, rel=1e-4, abs=1e-5) if number else value
                assert mine[key] == near


def test_swapped_model_takes_nested_input() -> None:
    """Its mask argument is left out: nothing warns, nothing is looked for in the tensor."""

    class Masked(Residual):
        def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            del padding_mask
            return super().forward(x)

    model, other = (Masked(nn.LayerNorm, nn.Linear(8, 8)) for _ in range(2))
    other.load_state_dict(model.state_dict())
    for one in (model, other):
        powernorm.swap(one, "bn")
    batch, mask = batches()[0][:3], padding()[:3]
    y = model(jagged(batch[~mask], LENGTHS[:3])).values()
    torch.testing.assert_close(y, other(batch, mask)[~mask])


@pytest.mark.parametrize("case", [c for c in STATEFUL if not counts_padding(c)], ids=case_id)
def test_packed_row_equals_the_padded_batch(case: Case) -> None:
    """Sequences one behind the other, without a mask: (tokens, C) and (1, tokens, C)."""

    def row(norm: nn.Module, x: Tensor, residual: Tensor) -> Any:
        return norm(x[~padding()], None, residual[~padding()])

    def batch_of_one(norm: nn.Module, x: Tensor, residual: Tensor) -> Any:
        y, total = norm(x[~padding()][None], None, residual[~padding()][None])
        return y[0], total[0]

    expected = train(case.build(dtype=torch.float64), padded_call, torch.float64)
    for call in (row, batch_of_one):
        got = train(case.build(dtype=torch.float64), call, torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_the_ragged_dimension_without_torchs_attribute() -> None:
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    for one in (x, x.transpose(1, 2)):
        shown: Any = SimpleNamespace(shape=one.shape)
        assert nested._ragged_dim(shown) == nested._ragged_dim(one)
