"""Contract of every norm: shapes, types, masks, gradients, state; one suite for the table."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

import powernorm
from cases import (
    BATCH_FORWARD,
    CASES,
    KEEPING_STATE,
    PAPER,
    STATEFUL,
    Case,
    case_id,
    is_stateful,
    states,
    step,
)
from refusals import refuses

every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
REP_RELEASED = next(c for c in CASES if c.name == "repbn" and "variant" in c.options)
PROGRESSIVE = next(c for c in CASES if c.name == "prepbn" and "evaluation" not in c.options)
stateful_case = pytest.mark.parametrize("case", STATEFUL, ids=case_id)


@pytest.fixture(autouse=True, scope="module", params=[None, "eager"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """The whole suite on the kernels where they exist, then on eager torch."""
    with powernorm.ops.use_backend(request.param):
        yield


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) * 2 + 0.3


def mask_of(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator) < 0.3


@pytest.mark.thinned
@every_case
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (2, 3, 4, 8), (1, 1, 8), (8,)])
@pytest.mark.parametrize("training", [True, False])
def test_shape_and_type_stay(case: Case, shape: tuple[int, ...], training: bool) -> None:
    norm = case.build().train(training)
    x = tokens(*shape).requires_grad_()
    y = norm(x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.isfinite().all()
    y.sum().backward()
    assert x.grad.isfinite().all()


@every_case
def test_takes_a_1_tuple_as_torch_and_timm_pass_it(case: Case) -> None:
    assert case.build((8,)).num_features == 8  # type: ignore[arg-type]
    refuses("last dimension", case.build, (4, 8))


@every_case
def test_non_contiguous_input(case: Case) -> None:
    x = tokens(4, 3, 8)
    mask = mask_of(4, 3)
    for view in (x.transpose(0, 1), tokens(4, 3, 16)[..., ::2], tokens(8, 6).t().reshape(6, 8)):
        view_mask = None if view.ndim == 2 else mask[: view.shape[0], : view.shape[1]]
        if view_mask is not None and view_mask.shape != view.shape[:-1]:
            view_mask = mask.t()
        y, grad = step(case.build(), view, view_mask)
        expected = step(case.build(), view.contiguous(), view_mask)
        torch.testing.assert_close(y, expected[0])
        torch.testing.assert_close(grad, expected[1])


@pytest.mark.thinned
@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(case: Case, dtype: torch.dtype) -> None:
    """The result is the float32 one rounded; buffers stay float32."""
    low = case.build().to(dtype)
    wide = case.build()
    wide.load_state_dict(
        {k: v.float() if v.is_floating_point() else v for k, v in low.state_dict().items()}
    )
    for seed in range(3):
        x = tokens(3, 5, 8, seed=seed, dtype=dtype)
        y, grad = step(low, x, mask_of(3, 5))
        expected, expected_grad = step(wide, x.float(), mask_of(3, 5))
        assert y.dtype == grad.dtype == dtype
        tolerance = 3 * torch.finfo(dtype).eps
        torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            grad.float(), expected_grad, rtol=8 * tolerance, atol=8 * tolerance
        )
    for name, buffer in low.named_buffers():
        if buffer.is_floating_point():
            assert buffer.dtype == torch.float32, name
            torch.testing.assert_close(buffer, wide.get_buffer(name), rtol=0.02, atol=0.02)


@pytest.mark.thinned
@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(case: Case, dtype: torch.dtype) -> None:
    norm = case.build()
    linear = torch.nn.Linear(8, 8)
    powernorm.set_loss_scale(norm)  # float16 without a scaler
    for seed in range(2):
        with torch.autocast("cpu", dtype=dtype):
            y = norm(linear(tokens(2, 4, 8, seed=seed)), mask_of(2, 4))
        assert y.dtype == dtype
        y.float().square().mean().backward()
    assert linear.weight.grad.isfinite().all()
    assert all(b.dtype in (torch.float32, torch.int64) for b in norm.buffers())


@stateful_case
def test_buffers_follow_double_and_come_back(case: Case) -> None:
    norm = case.build()
    step(norm, tokens(2, 3, 8), None)
    before = states(norm)
    norm.double()
    y, _ = step(norm, tokens(2, 3, 8, dtype=torch.float64), None)
    assert y.dtype == torch.float64
    assert all(b.dtype in (torch.float64, torch.int64) for b in norm.buffers())
    norm.float().half().float()
    assert all(b.dtype in (torch.float32, torch.int64) for b in norm.buffers())
    assert any(not torch.equal(before[n], b) for n, b in norm.named_buffers())


@pytest.mark.thinned
@every_case
@pytest.mark.parametrize("masked", [False, True])
def test_gradient(case: Case, masked: bool) -> None:
    """Exact for random cotangents, at padded outputs too; not exact where the paper says so."""
    norm = case.build(dtype=torch.float64)
    if case not in BATCH_FORWARD:
        step(norm, tokens(2, 3, 8, seed=9, dtype=torch.float64), None)  # ν, r, d off their start
    x = tokens(2, 3, 8, dtype=torch.float64).requires_grad_()
    mask = mask_of(2, 3) if masked else None
    parameters = tuple(norm.parameters())

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return norm(x, mask)

    if case.exact_gradient:
        assert torch.autograd.gradcheck(run, (x, *parameters))
    else:
        with pytest.raises(GradcheckError):
            torch.autograd.gradcheck(run, (x,))


def other_strides(saved: torch.Tensor) -> torch.Tensor:
    return torch.stack([saved, torch.full_like(saved, 3)], -1)[..., 0]


@every_case
def test_saved_tensors_may_come_back_with_other_strides(case: Case) -> None:
    """Hooks that offload or pack what was saved may do so: gradients would be wrong in silence."""
    results = []
    for unpack in (torch.clone, other_strides):
        norm, x = case.build(), tokens(2, 3, 8).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(torch.detach, unpack):
            norm(x).square().sum().backward()
        gradients = [parameter.grad for parameter in norm.parameters()]
        results.append([x.grad, *gradients, *norm.buffers()])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_mabn_beyond_its_own_statistics_is_a_surrogate() -> None:
    norm = powernorm.MovingAverageBatchNorm(8, window=2, warmup_steps=0, dtype=torch.float64)
    for seed in range(3):
        step(norm, tokens(2, 5, 8, seed=seed, dtype=torch.float64), None)
    x = tokens(2, 5, 8, dtype=torch.float64).requires_grad_()
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(norm, (x,))


@stateful_case
def test_double_backward_raises_clearly(case: Case) -> None:
    norm = case.build()
    step(norm, tokens(2, 3, 8), None)  # PRepBN's warm-up is LayerNorm, which has one
    x = tokens(2, 5, 8).requires_grad_()
    (grad,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


@pytest.mark.thinned
@pytest.mark.parametrize(
    "case", [c for c in STATEFUL if c in PAPER or c.name not in ("pn", "un")], ids=case_id
)
@pytest.mark.parametrize("seed", range(3))
def test_padding_is_deletion(case: Case, seed: int) -> None:
    """Valid tokens see what they would see without padding, whatever the padding holds."""
    padded, deleted = case.build(), case.build()
    for t in range(4):
        x, mask = tokens(3, 6, 8, seed=10 * seed + t), mask_of(3, 6, seed=10 * seed + t)
        garbage = torch.where(mask.unsqueeze(-1), torch.tensor(1e6), x)
        y, grad = step(padded, garbage, mask, seed=t)
        generator = torch.Generator().manual_seed(t)
        cotangent = torch.randn(3, 6, 8, generator=generator, dtype=torch.float64).float()
        rest = x[~mask].requires_grad_()
        expected = deleted(rest)
        (expected * cotangent[~mask]).sum().backward()
        torch.testing.assert_close(y[~mask], expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad[~mask], rest.grad, rtol=1e-4, atol=1e-5)
    for name, buffer in padded.named_buffers():
        torch.testing.assert_close(buffer, deleted.get_buffer(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", PAPER, ids=case_id)
def test_padded_positions_get_the_same_affine_map(case: Case) -> None:
    norm = case.build()
    x, mask = tokens(1, 6, 8), torch.tensor([[False] * 4 + [True] * 2])
    x[0, 5] = x[0, 0]
    y = norm(x, mask)
    torch.testing.assert_close(y[0, 5], y[0, 0])


@stateful_case
@pytest.mark.parametrize("after", [0, 3])
def test_no_valid_token(case: Case, after: int) -> None:
    """Running statistics are used, nothing moves, nothing is NaN."""
    norm = case.build()
    for seed in range(after):
        step(norm, tokens(2, 3, 8, seed=seed), None)
    before = states(norm)
    x, mask = tokens(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)
    _, grad = step(norm, x, mask)
    assert grad.isfinite().all()
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name
    y = norm(x, mask)
    assert y.isfinite().all()
    # The released form skips padding in training; PRepBN evaluates by another mixture.
    other = case in (REP_RELEASED, PROGRESSIVE)
    # Two correct by r and d as well.
    if not other and (not after or case.name not in ("mabn", "brn")):
        torch.testing.assert_close(y, norm.eval()(x, mask))


@every_case
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (0, 8)])
def test_empty_input(case: Case, shape: tuple[int, ...]) -> None:
    norm = case.build()
    before = states(norm)
    y, grad = step(norm, torch.zeros(shape), None)
    assert y.shape == grad.shape == shape
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert all(p.grad is None or not p.grad.any() for p in norm.parameters())


@stateful_case
def test_one_token_has_a_variance(case: Case) -> None:
    norm = case.build()
    y, grad = step(norm, tokens(1, 8), None)
    assert y.isfinite().all()
    assert grad.isfinite().all()
    assert all(b.isfinite().all() for b in norm.buffers())
    assert int(norm.num_nonfinite_batches) == 0


@stateful_case
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_nonfinite_batch_is_counted_and_left_out(case: Case, poison: float) -> None:
    norm = case.build()
    step(norm, tokens(2, 3, 8), None)
    before = states(norm)
    x = tokens(2, 3, 8, seed=1)
    x[0, 0, 2] = poison
    step(norm, x, None)
    after = states(norm)
    assert int(after["num_nonfinite_batches"]) == 1
    groups = norm.groups
    hurt = range(8) if groups is None else range(8 // groups)
    for name, buffer in after.items():
        assert buffer.isfinite().all(), name
        if name.startswith(("running", "window")):
            assert torch.equal(buffer[..., 2], before[name][..., 2]), name
            if groups is None and case.name not in ("brn", "rbn"):
                others = [c for c in hurt if c != 2]
                assert not torch.equal(buffer[..., others], before[name][..., others]), name
    step(norm, tokens(2, 3, 8, seed=2), None)
    assert all(b.isfinite().all() for b in norm.buffers())


@pytest.mark.parametrize("case", KEEPING_STATE, ids=case_id)
def test_checkpoint_resumes_exactly(case: Case) -> None:
    whole, first = case.build(), case.build()
    for t in range(3):
        for norm in (whole, first):
            step(norm, tokens(2, 3, 8, seed=t), mask_of(2, 3, seed=t))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = case.build()
    second.load_state_dict(torch.load(file))
    for t in range(3, 7):
        a = step(whole, tokens(2, 3, 8, seed=t), None)
        b = step(second, tokens(2, 3, 8, seed=t), None)
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    assert all(torch.equal(b, second.get_buffer(n)) for n, b in whole.named_buffers())


@pytest.mark.thinned
@every_case
@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "assign"])
def test_copies_train_on_their_own(case: Case, copied: str) -> None:
    norm, reference = case.build(), case.build()
    for each in (norm, reference):
        step(each, tokens(2, 3, 8), None)
    if copied == "deepcopy":
        twin = copy.deepcopy(norm)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(norm))
    else:
        # What loaders do that build on the meta device.
        twin = case.build(device="meta") if case.stateful else case.build()
        twin.load_state_dict(copy.deepcopy(norm.state_dict()), assign=True)
    for t in range(1, 5):
        a = step(twin, tokens(2, 3, 8, seed=t), None)
        b = step(reference, tokens(2, 3, 8, seed=t), None)
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    for name, buffer in reference.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), name
        if name == "num_batches_tracked":
            assert int(norm.get_buffer(name)) == 1


@stateful_case
def test_two_uses_in_one_step_are_one_batch_or_two(case: Case) -> None:
    """A shared layer: forward-state norms count each use, backward-state norms merge them."""
    norm, merged = case.build(), case.build()
    a, b = tokens(2, 3, 8).requires_grad_(), tokens(2, 3, 8, seed=1).requires_grad_()
    (norm(a).sum() + norm(b).sum()).backward()
    if case in BATCH_FORWARD:
        assert int(norm.num_batches_tracked) == 2
        return
    assert int(norm.num_batches_tracked) == 1
    if norm.centered or case.name not in ("mabn", "un"):
        merged(torch.cat([a, b])).sum().backward()
        for name in ("running_mean", "running_var", "running_second_moment"):
            if hasattr(norm, name):
                torch.testing.assert_close(getattr(norm, name), getattr(merged, name))


@stateful_case
def test_reset(case: Case) -> None:
    norm, fresh = case.build(), powernorm.build_norm(case.name, 8, **case.options)
    for t in range(4):
        step(norm, tokens(2, 3, 8, seed=t), None)
    norm.reset_parameters()
    for name, value in fresh.state_dict().items():
        assert torch.equal(norm.state_dict()[name], value), name
    a, b = step(norm, tokens(2, 3, 8), None), step(fresh, tokens(2, 3, 8), None)
    assert torch.equal(a[0], b[0])


@every_case
def test_static_norms_give_their_affine_map(case: Case) -> None:
    norm = case.build()
    for t in range(3):
        step(norm, tokens(2, 3, 8, seed=t), None)
    norm.eval()
    if not norm.is_static:
        refuses("cannot be folded", norm.affine)
        return
    a, c = norm.affine()
    x = tokens(2, 3, 8, dtype=torch.float64)
    y = norm.double()(x)
    torch.testing.assert_close(a * x + c, y, rtol=1e-6, atol=1e-6)


@every_case
def test_bad_input_names_value_and_mend(case: Case) -> None:
    norm = case.build()
    refuses(r"built for 8 features.*\(2, 7\)", norm, torch.zeros(2, 7))
    refuses(r"int64.*x\.float\(\)", norm, torch.zeros(2, 8, dtype=torch.long))
    with pytest.raises(powernorm.InputError, match=r"\(3, 2\), expected \(2, 3\)"):
        norm(torch.zeros(2, 3, 8), torch.zeros(3, 2, dtype=torch.bool))
    refuses("attention_mask == 0", norm, torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.long))
    refuses("mask < 0", norm, torch.zeros(2, 3, 8), torch.zeros(2, 3))
    if case.stateful:
        with (
            powernorm.padding_mask(torch.zeros(2, dtype=torch.bool)),
            pytest.raises(powernorm.InputError, match="padding_mask has shape"),
        ):
            norm(torch.zeros(2, 3, 8))


@every_case
def test_every_parameter_has_a_dimension(case: Case) -> None:
    """FSDP2 refuses to divide numbers without one."""
    assert all(parameter.ndim for parameter in case.build().parameters())


@every_case
def test_repr_says_its_settings(case: Case) -> None:
    assert "8" in case.build().extra_repr()


def test_every_norm_has_a_case() -> None:
    assert {case.name for case in CASES} == set(powernorm.NORMS)
    for case in CASES:
        assert case.stateful == is_stateful(case.build())
        if "groups" not in case.options or case.name in ("gs", "gn"):
            defaults = powernorm.build_norm(case.name, 8)
            if case.name == "taper":
                defaults.num_batches_tracked.fill_(defaults.end_step)
            assert defaults.is_static == powernorm.NORMS[case.name].static


@pytest.mark.parametrize("case", PAPER, ids=case_id)
def test_training_step_are_those_of_one_batch(case: Case) -> None:
    """Micro-batches in one scope move the statistics as all their tokens in one batch do."""
    parts, whole = case.build(dtype=torch.float64), case.build(dtype=torch.float64)
    for t in range(3):
        x = tokens(6, 5, 8, seed=t, dtype=torch.float64) * (1 + t)
        mask = mask_of(6, 5, seed=t)
        with powernorm.training_step(parts):
            for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
                parts(x[rows].clone().requires_grad_(), mask[rows]).sum().backward()
        assert int(parts.num_batches_tracked) == t + 1
        whole(x.clone().requires_grad_(), mask).sum().backward()
        for name in ("running_mean", "running_var", "running_second_moment"):
            if hasattr(parts, name):
                torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
        if hasattr(parts, "stage"):
            assert parts.stage == whole.stage


@stateful_case
def test_accumulation_scope_after_an_exception_and_inside_another(case: Case) -> None:
    norm = case.build()
    before = states(norm)

    def interrupted() -> None:
        with powernorm.training_step(norm):
            step(norm, tokens(2, 3, 8), None)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        interrupted()
    assert all(torch.equal(b, before[n]) for n, b in norm.named_buffers())
    step(norm, tokens(2, 3, 8), None)
    assert int(norm.num_batches_tracked) == 1
    nested = powernorm.training_step(norm)
    with powernorm.training_step(norm), pytest.raises(powernorm.InputError, match="open"):
        nested.__enter__()
