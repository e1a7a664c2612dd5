"""LayerNorm with a constant deviation, and BatchNorm behind LayerNorm's centering."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import powernorm
from norms.test_goldens import Golden, check
from powernorm.surgery.removal import CenteredBatchNorm, FrozenDeviationNorm
from refusals import refuses
from surgery.removal.small_models import C, data, stack

FROZEN = "powernorm.surgery.removal.layers:FrozenDeviationNorm"
CENTERED = "powernorm.surgery.removal.layers:CenteredBatchNorm"


@pytest.mark.parametrize("name", ["fakeln_released", "fakeln_released_first_position"])
def test_is_the_released_layer(name: str) -> None:
    """Outputs, gradients and D of every step; S of those that normalize, which end by it."""
    golden, meta = Golden(name), Golden(name).meta
    norm = FrozenDeviationNorm(
        6,
        eps=meta["eps"],
        momentum=1 - meta["old_weight"],
        first_position=meta["first_position_special"],
        dtype=torch.float64,
    )
    golden.load_affine(norm)
    start = [meta["init_bos_std"], meta["init_average_std"]]
    known = start if norm.first_position else start[1]
    norm.running_deviation.copy_(torch.tensor(known, dtype=torch.float64))
    for step in range(golden.num_steps):
        if step == meta["fake_from_step_index"]:
            norm.freeze()
        if step == meta["first_position_merged_at"]:
            norm.merge_first_position()
        x = golden.tokens("x", step).requires_grad_()
        norm.zero_grad()
        y = norm(x)
        (y * golden.tokens("grad_out", step)).sum().backward()
        assert x.grad is not None
        check("y", y, golden.tokens("y", step))
        check("grad_x", x.grad, golden.tokens("grad_x", step))
        for key in ("weight", "bias"):
            grad = norm.get_parameter(key).grad
            assert grad is not None
            check(key, grad, golden.row(f"grad_{key}", step))
        expected = golden.row("buf_average_std", step)
        check("D", norm.deviation.flatten()[-1], expected[-1])
        if norm.first_position:
            check("D at position 0", norm.deviation[0], expected[0])
    last = golden.arrays["y_eval_last"].swapaxes(0, 1).copy()
    x = golden.tokens("x", golden.num_steps - 1)
    check("evaluation", norm.eval()(x), torch.from_numpy(last))


def test_before_it_is_frozen_it_is_the_norm_that_it_replaces() -> None:
    for kind in (nn.LayerNorm, nn.RMSNorm):
        original = stack(kind)
        model = copy.deepcopy(original)
        powernorm.swap(model, to=FROZEN, center=kind is nn.LayerNorm, eps=1e-5)
        if kind is nn.RMSNorm:
            for module in original.modules():
                if isinstance(module, nn.RMSNorm):
                    module.eps = 1e-5
        x = data(1)[0]
        torch.testing.assert_close(model(x), original(x), rtol=1e-12, atol=1e-12)


def test_average_is_over_valid_tokens_of_training_calls() -> None:
    norm = FrozenDeviationNorm(2, eps=1e-5, momentum=1.0, dtype=torch.float64)
    x = torch.tensor([[[0.0, 2.0], [0.0, 200.0]]], dtype=torch.float64)
    mask = torch.tensor([[False, True]])
    norm.train()(x, mask)
    assert float(norm.deviation) == pytest.approx(1.0, abs=1e-4)
    norm.eval()(x)
    assert float(norm.deviation) == pytest.approx(1.0, abs=1e-4)


def test_frozen_layer_has_no_gradient_through_its_deviation() -> None:
    norm = FrozenDeviationNorm(4, dtype=torch.float64).freeze(2.0)
    assert torch.autograd.gradcheck(norm, data(1)[0][..., :4].requires_grad_())


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_deviation_has_to_be_above_zero(bad: float) -> None:
    refuses("expected numbers above 0", FrozenDeviationNorm(4).freeze, bad)


def test_it_is_static_once_it_is_frozen_for_all_positions() -> None:
    norm = FrozenDeviationNorm(4, first_position=True)
    refuses("depends on each token", norm.affine)
    norm.freeze()
    assert not norm.is_static
    norm.merge_first_position()
    assert (norm.is_static, norm.centers) == (False, True)
    norm.affine()
    alone = FrozenDeviationNorm(4, center=False).freeze()
    assert (alone.is_static, alone.centers) == (True, False)


@pytest.mark.parametrize("to", [FROZEN, CENTERED])
def test_what_centers_folds_exactly_into_the_linear_maps_behind_it(to: str) -> None:
    original = stack()
    model = copy.deepcopy(original)
    powernorm.swap(model, to=to)
    if to == CENTERED:
        powernorm.match_teacher(model, original, data())
    for module in model.modules():
        if isinstance(module, FrozenDeviationNorm):
            module.freeze(1.3)
    x = data(1)[0]
    expected = model.eval()(x)
    report = powernorm.fold(model, x)
    assert [row.action for row in report.rows] == ["fold"] * 5
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert report.errors[0].relative < 1e-12
    assert not any(isinstance(module, powernorm.Norm) for module in model.modules())


def test_what_centers_in_a_residual_stream_stays_and_says_why() -> None:
    model = stack(post=True)
    powernorm.swap(model, to=FROZEN)
    for module in model.modules():
        if isinstance(module, FrozenDeviationNorm):
            module.freeze()
    x = data(1)[0]
    expected = model.eval()(x)
    report = powernorm.fold(model, x)
    kept = {row.name: row.reason for row in report.rows if row.action == "keep"}
    assert "only a linear map behind it can take over" in kept["blocks.0.norm1"]
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_centered_maps_explain_more_of_layer_norm() -> None:
    """On inputs with a mean of their own the centering is what a map per feature cannot do."""
    teacher = nn.Sequential(nn.LayerNorm(C, dtype=torch.float64)).eval()
    shifts = torch.randn(6, 4, 6, 1, generator=torch.Generator().manual_seed(2)).double()
    batches = [x + 3 * shift for x, shift in zip(data(), shifts, strict=True)]
    explained = {}
    for to in ("bn", CENTERED):
        model = copy.deepcopy(teacher)
        powernorm.swap(model, to=to, where="*")
        explained[to] = powernorm.match_teacher(model.eval(), teacher, batches).rows[0].explained
    assert explained[CENTERED] > 0.8 > 0.5 > explained["bn"]


def test_centered_batch_norm_is_batch_norm_of_centered_tokens() -> None:
    x = data(1)[0]
    centered = x - x.mean(-1, keepdim=True)
    ours, plain = (
        kind(C, dtype=torch.float64) for kind in (CenteredBatchNorm, powernorm.BatchNorm)
    )
    torch.testing.assert_close(ours(x), plain(centered))
    torch.testing.assert_close(ours.running_var, plain.running_var)
    y, total = ours.eval()(x, None, x)
    torch.testing.assert_close((y, total), (plain.eval()(2 * centered), 2 * x))


def training_layer(**options: Any) -> FrozenDeviationNorm:
    return FrozenDeviationNorm(8, **options).train()


def tokens(seed: int) -> Tensor:
    return 3 * torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(seed))


def counts(norm: FrozenDeviationNorm) -> tuple[int, int]:
    return int(norm.num_batches_tracked), int(norm.num_nonfinite_batches)


def test_averages_of_a_bfloat16_module_are_in_float32() -> None:
    """An average in bfloat16 would not move by less than half its last digit."""
    wide = training_layer(momentum=0.01)
    narrow = copy.deepcopy(wide).bfloat16()
    for seed in range(300):
        x = tokens(seed).bfloat16()
        narrow(x)
        wide(x.float())
    assert narrow.running_deviation.dtype == narrow.deviation.dtype == torch.float32
    torch.testing.assert_close(narrow.deviation, wide.deviation)


@pytest.mark.parametrize("kind", [FrozenDeviationNorm, CenteredBatchNorm])
def test_bfloat16_is_centered_in_float32(kind: type[nn.Module]) -> None:
    """At a mean of 300 the difference of two numbers of bfloat16 is a multiple of 2."""
    norm = kind(8).bfloat16()
    x = (tokens(0) + 300).bfloat16()
    expected = copy.deepcopy(norm).float()(x.float()).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected)
    y, total = norm.eval()(x, None, x)
    assert y.dtype == total.dtype == torch.bfloat16


@pytest.mark.parametrize("way", ["checkpoint", "selective", "compiled inside", "compiled outside"])
def test_a_repeated_forward_counts_once(way: str) -> None:
    norm = training_layer(first_position=True)
    plain = copy.deepcopy(norm)
    call: Callable[[Tensor], Tensor] = norm
    context: dict[str, Any] = {}
    if way == "compiled inside":
        call = torch.compile(norm, backend="aot_eager", fullgraph=True)
    if way == "selective":
        context["context_fn"] = partial(
            create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE
        )

    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(call, x, use_reentrant=False, **context)
        return y

    if way == "compiled outside":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        x, other = (tokens(seed).requires_grad_() for _ in range(2))
        mask = torch.zeros(2, 20, dtype=torch.bool)
        mask[0, 5:] = True
        with powernorm.padding_mask(mask):
            y, expected = run(x), plain(other)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
    assert counts(norm) == (3, 0)
    torch.testing.assert_close(norm.deviation, plain.deviation)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_batch_that_is_not_finite_moves_nothing(bad: float) -> None:
    norm = training_layer(first_position=True)
    norm(tokens(0))
    before = norm.deviation.clone()
    x = tokens(1)
    x[0, 4, 2] = bad
    norm(x)
    assert counts(norm) == (2, 1)
    assert norm.deviation[1] == norm.running_deviation[1] == before[1]
    assert norm.deviation[0] != before[0]
    norm(x, torch.ones(2, 20, dtype=torch.bool))
    assert counts(norm) == (2, 1)


def test_a_training_step_is_one_step_or_none() -> None:
    norm, whole = training_layer(), training_layer()
    before = copy.deepcopy(norm.state_dict())
    with powernorm.training_step(norm) as step:
        norm(tokens(0)).sum().backward()
        step.skip()
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name]), name
    with powernorm.training_step(norm):
        for part in tokens(1).chunk(2):
            norm(part)
    whole(tokens(1))
    assert counts(norm) == counts(whole) == (1, 0)
    torch.testing.assert_close(norm.deviation, whole.deviation)


def test_transforms_are_refused_in_training() -> None:
    norm, x = training_layer(), tokens(0)
    refuses(r"torch\.func", torch.func.vmap(norm), x)
    torch.testing.assert_close(torch.func.vmap(norm.eval())(x), norm(x))
