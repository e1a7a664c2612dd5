"""Features in another dimension than the last: the same layers, seen through a moved dimension."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from cases import CASES, LAYOUTS, STATEFUL, Case, case_id
from powernorm.ops.dispatch import functions_for, use_functions
from refusals import refuses

every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
layouts = pytest.mark.parametrize(("shape", "dim"), LAYOUTS)
FAMILIES = tuple({case.name: case for case in reversed(CASES)}.values())
SHAPE = (2, 8, 3, 4)


@pytest.fixture(autouse=True, scope="module", params=[None, "eager"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with powernorm.ops.use_backend(request.param):
        yield


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 2 + 0.3


def mask_for(shape: tuple[int, ...], dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(draw(shape, 0).movedim(dim, -1).shape[:-1], generator=generator) < 0.3


def laid_out(x: Tensor, memory_format: str) -> Tensor:
    """The same values with the features next to each other in memory, in order, or in between."""
    if memory_format == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if memory_format == "turned":
        order = [x.ndim - 1, *range(x.ndim - 1)]
        return x.permute(order).contiguous().permute([*range(1, x.ndim), 0])
    return x.contiguous()


def close(ours: Tensor, expected: Tensor, what: str) -> None:
    tight = 1e-12 if expected.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(ours, expected, rtol=tight, atol=tight, msg=lambda m: f"{what}: {m}")


def compare(
    case: Case,
    shape: tuple[int, ...],
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    masked: bool = False,
    memory_format: str = "contiguous",
    residual: bool = False,
) -> None:
    """Three steps of a layer over a dimension and of the same layer over the last one."""
    ours = case.build(dtype=dtype, feature_dim=dim)
    twin = case.build(dtype=dtype)
    for t in range(3):
        mask = mask_for(shape, dim, t) if masked else None
        values = draw(shape, t, dtype)
        x = laid_out(values.clone(), memory_format).requires_grad_()
        moved = values.movedim(dim, -1).contiguous().requires_grad_()
        cotangent = draw(shape, 50 + t, dtype)
        if residual:
            stream = draw(shape, 80 + t, dtype)
            y, total = ours(x, mask, stream)
            expected, expected_total = twin(moved, mask, stream.movedim(dim, -1))
            close(total, expected_total.movedim(-1, dim), "total")
            assert total.stride() == x.stride()
        else:
            y, expected = ours(x, mask), twin(moved, mask)
        close(y, expected.movedim(-1, dim), "output")
        assert y.stride() == x.stride()
        assert y.dtype == dtype
        (y * cotangent).sum().backward()
        (expected * cotangent.movedim(dim, -1)).sum().backward()
        close(x.grad, moved.grad.movedim(-1, dim), "input gradient")
    for (name, parameter), other in zip(ours.named_parameters(), twin.parameters(), strict=True):
        close(parameter.grad, other.grad, name)
    for (name, buffer), value in zip(ours.named_buffers(), twin.buffers(), strict=True):
        close(buffer, value, name)
    ours.eval(), twin.eval()
    values = draw(shape, 9, dtype)
    close(ours(values), twin(values.movedim(dim, -1)).movedim(-1, dim), "evaluation")


@pytest.mark.thinned(1)
@every_case
@layouts
def test_equals_the_layer_over_the_last_dimension(
    case: Case, shape: tuple[int, ...], dim: int
) -> None:
    compare(case, shape, dim)
    compare(case, shape, dim, masked=True)


@pytest.mark.thinned(1)
@every_case
@pytest.mark.parametrize("memory_format", ["channels_last", "turned"])
def test_equals_it_in_every_memory_format(case: Case, memory_format: str) -> None:
    compare(case, SHAPE, 1, memory_format=memory_format)
    compare(case, SHAPE, 1, memory_format=memory_format, masked=True, residual=True)


@every_case
def test_equals_it_in_float64_and_with_a_residual(case: Case) -> None:
    compare(case, SHAPE, 1, dtype=torch.float64, masked=True)
    compare(case, SHAPE, 1, residual=True)


def test_layer_norm_is_over_the_channels_of_each_position() -> None:
    x = draw(SHAPE, 0)
    mean = x.mean(1, keepdim=True)
    expected = (x - mean) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(powernorm.build_norm("ln", 8, feature_dim=1)(x), expected)


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_batch_norm_is_torchs_over_images(memory_format: str) -> None:
    ours = powernorm.BatchNorm(8, feature_dim=1, start="torch")
    theirs = nn.BatchNorm2d(8)
    for seed in range(3):
        x = laid_out(draw(SHAPE, seed), memory_format)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    state = ours.state_dict()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(state[name], value)
    ours.load_state_dict(theirs.state_dict())
    x = draw(SHAPE, 7)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


class Recorder:
    """The functions that serve the ops, with where their first inputs and outputs lie."""

    def __init__(self, x: Tensor) -> None:
        self.functions = functions_for(x)
        self.places: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.functions, name)

        def call(args: Any, *others: Any) -> Any:
            result = function(args, *others)
            if name != "update_running_stats":
                self.places.append((name, args[0].data_ptr(), result[0].data_ptr()))
                assert args[0].is_contiguous()
            return result

        return call


@pytest.mark.parametrize("name", ["bn", "rbn", "pnv", "pn-only", "rms"])
def test_nothing_is_copied_where_the_features_lie_next_to_each_other(name: str) -> None:
    norm = powernorm.build_norm(name, 8, feature_dim=1)
    x = laid_out(draw(SHAPE, 0), "channels_last").requires_grad_()
    cotangent = laid_out(draw(SHAPE, 1), "channels_last")
    recorder = Recorder(x)
    with use_functions(recorder):
        y = norm(x)
        (grad,) = torch.autograd.grad(y, x, cotangent)
    (_, before, after), *_, (_, grad_before, grad_after) = recorder.places
    assert (before, after) == (x.data_ptr(), y.data_ptr())
    assert (grad_before, grad_after) == (cotangent.data_ptr(), grad.data_ptr())
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("case", STATEFUL, ids=case_id)
def test_mask_of_the_scope(case: Case) -> None:
    one, other = case.build(feature_dim=1), case.build(feature_dim=1)
    x, mask = draw(SHAPE, 0), mask_for(SHAPE, 1, 0)
    with powernorm.padding_mask(mask):
        y = one(x)
    torch.testing.assert_close(y, other(x, mask))


def test_helpers_go_by_the_dimension() -> None:
    moved, last = (powernorm.RegularizedBatchNorm(8, feature_dim=dim) for dim in (1, -1))
    x = draw(SHAPE, 0)
    for norm, given in ((moved, x), (last, x.movedim(1, -1))):
        norm(given.requires_grad_() if given.is_leaf else given)
    torch.testing.assert_close(
        powernorm.penalty(moved, num_tokens=24), powernorm.penalty(last, num_tokens=24)
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 3), powernorm.BatchNorm(8, feature_dim=1))
    images = [draw((4, 3, 6, 6), seed) for seed in range(3)]
    powernorm.calibrate(model, images)
    hidden = torch.cat([model[0](image) for image in images])
    torch.testing.assert_close(model[1].running_mean, hidden.mean((0, 2, 3)))
    torch.testing.assert_close(model[1].running_var, hidden.var((0, 2, 3)))


@every_case
def test_says_it_and_keeps_it(case: Case) -> None:
    norm = case.build(feature_dim=1)
    assert "feature_dim=1" in repr(norm)
    assert "feature_dim" not in repr(case.build())
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert copied.feature_dim == 1
        close(copied(draw(SHAPE, 0)), norm(draw(SHAPE, 0)), "copy")
    last = case.build()
    assert last.state_dict().keys() == norm.state_dict().keys()
    last.load_state_dict(norm.state_dict())


def test_a_layer_from_before_there_was_a_choice_has_its_features_last() -> None:
    norm = powernorm.BatchNorm(8)
    del norm.__dict__["feature_dim"]
    copied = pickle.loads(pickle.dumps(norm))
    assert copied.feature_dim == -1
    assert copied(draw((3, 8), 0)).shape == (3, 8)


@pytest.mark.parametrize("name", ["ln", "bn", "pn-only", "none"])
@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.ones(8), None, r"8 features in dimension 1 .*shape \(8,\).*feature_dim=-1"),
        (torch.ones(2, 3, 4, 8), None, r"in dimension 1 \(feature_dim\).*build.*feature_dim=-1"),
        (torch.ones(2, 3, 8, 4), None, r"build the layer with feature_dim=2 for it"),
        (torch.ones(2, 7, 3, 4), None, r"got an input of shape \(2, 7, 3, 4\)$"),
        (torch.ones(2, 8, 3, 4, dtype=torch.long), None, "expected a floating point type"),
        (torch.ones(SHAPE), torch.zeros(2, 8, 3, dtype=torch.bool), r"expected \(2, 3, 4\)"),
        (torch.ones(SHAPE), torch.zeros(2, 3, 4), "1 = keep|torch.bool"),
        (torch.ones(SHAPE).numpy(), None, "got a ndarray, expected a tensor"),
        (torch.ones(SHAPE).tolist(), None, "got a list, expected a tensor"),
        (torch.ones(SHAPE), torch.zeros(2, 3, 4).bool().numpy(), "padding_mask is a ndarray"),
        (torch.ones(SHAPE), [[[False] * 4] * 3] * 2, "padding_mask is a list, expected a tensor"),
    ],
)
def test_bad_calls(name: str, x: Any, mask: Any, message: str) -> None:
    norm = powernorm.build_norm(name, 8, feature_dim=1)
    refuses(message, norm, x, mask)


def test_bad_scopes_and_residuals_name_the_shape_that_was_given() -> None:
    norm = powernorm.BatchNorm(8, feature_dim=1)
    bad: Any = [[False]]
    with (
        pytest.raises(powernorm.InputError, match="padding_mask is a list"),
        powernorm.padding_mask(bad),
    ):
        pass
    with (
        powernorm.padding_mask(torch.zeros(2, 3, dtype=torch.bool)),
        pytest.raises(powernorm.InputError, match=r"\(2, 3, 4\): .*input of shape \(2, 8, 3, 4\)"),
    ):
        norm(torch.ones(SHAPE))
    with pytest.raises(powernorm.InputError, match=r"residual has shape \(2, 3, 4, 8\)"):
        norm(torch.ones(SHAPE), None, torch.ones(2, 3, 4, 8))
    refuses("build the layer with feature_dim=1 for it", powernorm.BatchNorm(8), torch.ones(SHAPE))


@pytest.mark.parametrize("dim", [True, 1.0, "1", None])
def test_bad_dimensions(dim: Any) -> None:
    refuses("feature_dim is", powernorm.BatchNorm, 8, feature_dim=dim)
    refuses("feature_dim", powernorm.build_norm, "ln", 8, feature_dim=dim)


def test_a_leaf_is_no_model_that_forgot_the_penalty() -> None:
    norm = powernorm.RegularizedBatchNorm(8, feature_dim=1)
    x = draw(SHAPE, 0).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(110):
            norm(x).sum().backward()
