"""LayerNorm with a constant deviation, and BatchNorm behind LayerNorm's centering."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import powernorm
from norms.test_goldens import Golden, check
from powernorm.errors import InputError
from powernorm.surgery.removal import CenteredBatchNorm, FrozenDeviationNorm
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
    with pytest.raises(InputError, match="expected numbers above 0"):
        FrozenDeviationNorm(4).freeze(bad)


def test_it_is_static_once_it_is_frozen_for_all_positions() -> None:
    norm = FrozenDeviationNorm(4, first_position=True)
    with pytest.raises(InputError, match="depends on each token"):
        norm.affine()
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
