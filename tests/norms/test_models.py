"""Functions over a model's norms, the registry, masks of scopes, checkpoints of released code."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import powernorm
from cases import step, uses_batch_statistics
from powernorm.norms import center_weight, check_norm_options, current_padding_mask


def test_penalty_is_the_formula() -> None:
    torch.manual_seed(0)
    norm = powernorm.RegularizedBatchNorm(
        8, mean_penalty=0.3, var_penalty=0.2, momentum=0.1, start="torch"
    )
    x = torch.randn(4, 5, 8, dtype=torch.float64).float().requires_grad_()
    y = norm(x)
    flat = x.reshape(-1, 8)
    mean, var = flat.mean(0), flat.var(0, unbiased=False)
    target_mean = (0.1 * mean).detach()
    target_var = (0.9 + 0.1 * flat.var(0)).detach()
    expected = 0.3 * (target_mean - mean).square().sum() + 0.2 * (target_var - var).abs().sum()
    (ours_grad,) = torch.autograd.grad(norm.penalty(), x, retain_graph=True)
    (expected_grad,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(norm.penalty(), expected)
    torch.testing.assert_close(ours_grad, expected_grad)
    (both,) = torch.autograd.grad(y.sum() + norm.penalty(), x)
    torch.testing.assert_close(both, expected_grad, atol=1e-5, rtol=0)  # a sum of y is constant


def test_penalty_targets_are_the_buffers_after_the_step() -> None:
    norm = powernorm.RegularizedBatchNorm(8, mean_penalty=1.0, var_penalty=0.0)
    x = torch.randn(4, 5, 8, requires_grad=True)
    y = norm(x)
    value = norm.penalty()
    (y.sum() + value).backward()
    expected = (norm.running_mean - x.detach().reshape(-1, 8).mean(0)).square().sum()
    torch.testing.assert_close(value.detach(), expected)


def test_penalty_scale() -> None:
    model = nn.Sequential(powernorm.RegularizedBatchNorm(8), powernorm.RegularizedBatchNorm(8))
    model(torch.randn(4, 5, 8))
    total = powernorm.penalty(model, reduction="token_sum")
    torch.testing.assert_close(total, model[0].penalty() + model[1].penalty())
    torch.testing.assert_close(powernorm.penalty(model, "mean", num_tokens=20), total / 20)
    with pytest.raises(powernorm.InputError, match="num_tokens"):
        powernorm.penalty(model)
    with pytest.raises(powernorm.InputError, match="'sum'"):
        powernorm.penalty(model, reduction="sum")  # type: ignore[arg-type]
    assert float(powernorm.penalty(nn.Linear(2, 2), num_tokens=1)) == 0


@pytest.mark.parametrize("count", [0, -8, 0.5, float("nan"), float("inf"), True, "many"])
def test_number_of_tokens(count: object) -> None:
    model = nn.Sequential(powernorm.RegularizedBatchNorm(8))
    model(torch.randn(5, 8))
    with pytest.raises(powernorm.InputError, match=f"num_tokens is {count!r}, expected a number"):
        powernorm.penalty(model, "mean", count)  # type: ignore[arg-type]


def test_no_model() -> None:
    calls = (
        lambda: powernorm.penalty(None, "token_sum"),  # type: ignore[arg-type]
        lambda: powernorm.training_step(None).__enter__(),  # type: ignore[arg-type]
        lambda: powernorm.set_loss_scale(None),  # type: ignore[arg-type]
    )
    for call in calls:
        with pytest.raises(powernorm.InputError, match="model is None, expected a torch"):
            call()
    with pytest.raises(powernorm.InputError, match="scale is 'x', expected a finite number"):
        powernorm.set_loss_scale(nn.Linear(2, 2), "x")  # type: ignore[arg-type]


def test_skipped_step_leaves_nothing_to_a_loop_that_sets_the_mode() -> None:
    model = nn.Sequential(powernorm.RegularizedBatchNorm(8))
    x = torch.randn(5, 8)
    model(x)
    expected = powernorm.penalty(model, "token_sum")
    model(torch.full((5, 8), torch.nan))  # not gone back from
    model.train()
    model(x)
    torch.testing.assert_close(powernorm.penalty(model, "token_sum"), expected)


def test_penalty_of_a_shared_layer_and_of_micro_batches() -> None:
    norm = powernorm.RegularizedBatchNorm(8)
    with pytest.raises(powernorm.InputError, match="no training-mode forward"):
        norm.penalty()
    a, b = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    norm(a)
    first = norm.penalty()
    norm(b)
    second = norm.penalty()  # asked in between: only what came since
    both = powernorm.RegularizedBatchNorm(8)
    y = both(a) + both(b)  # two uses, asked once
    assert y.requires_grad
    torch.testing.assert_close(both.penalty(), first + second)
    (norm(a).sum() + norm.penalty()).backward()
    with pytest.raises(powernorm.InputError, match="no training-mode forward"):
        norm.penalty()


@pytest.mark.filterwarnings("ignore:padding_mask of shape")  # said once a process
def test_no_penalty_without_valid_tokens() -> None:
    norm = powernorm.RegularizedBatchNorm(8)
    x = torch.randn(2, 3, 8, requires_grad=True)
    y = norm(x, torch.ones(2, 3, dtype=torch.bool))
    assert norm.penalty().item() == 0
    (grad,) = torch.autograd.grad(norm.penalty() + 0 * y.sum(), x)
    assert not grad.any()


def test_unknown_names_and_options() -> None:
    with pytest.raises(powernorm.InputError, match=r"unknown norm 'bnn', known are ln, .*'bn'"):
        powernorm.build_norm("bnn", 8)
    with pytest.raises(powernorm.InputError, match="no option 'alpha', it takes eps, momentum"):
        powernorm.build_norm("pn", 8, alpha=0.9)
    with pytest.raises(powernorm.InputError, match=r"momentum of bn is 'x' \(str\)"):
        check_norm_options("bn", {"momentum": "x"})
    with pytest.raises(powernorm.InputError, match=r"warmup_steps of pn is 1.5 \(float\)"):
        check_norm_options("pn", {"warmup_steps": 1.5})
    check_norm_options("pn", {"groups": None, "max_ratio": 5, "variant": "paper"})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: powernorm.BatchNorm(8, momentum=0.0), "momentum is 0.0"),
        (lambda: powernorm.BatchNorm(8, eps=0.0), "eps is 0.0"),
        (lambda: powernorm.BatchNorm(0), "num_features is 0"),
        (
            lambda: powernorm.BatchNorm(8, groups=3),
            "groups is 3, expected a divisor of the 8",
        ),
        (lambda: powernorm.PowerNorm(8, warmup_steps=-1), "warmup_steps is -1"),
        (lambda: powernorm.PowerNorm(8, max_ratio=0.5), "max_ratio is 0.5"),
        (lambda: powernorm.PowerNorm(8, decay="no"), "decay is 'no'"),  # type: ignore[arg-type]
        (lambda: powernorm.PowerNorm(8, variant="new"), "variant is 'new'"),  # type: ignore[arg-type]
        (lambda: powernorm.PowerNorm(8, variant="released", max_ratio=5.0), "cannot be stabilized"),
        (lambda: powernorm.RegularizedBatchNorm(8, mean_penalty=-1.0), "mean_penalty is -1.0"),
        (lambda: powernorm.BatchRenorm(8, max_r=0.5), "max_r is 0.5"),
        (lambda: powernorm.BatchRenorm(8, max_d=-1.0), "max_d is -1.0"),
        (lambda: powernorm.MovingAverageBatchNorm(8, window=0), "window is 0"),
        (lambda: powernorm.SimpleLayerNorm(1, variant="released"), "at least 2 features"),
    ],
)
def test_bad_arguments(build: object, message: str) -> None:
    with pytest.raises(powernorm.InputError, match=message):
        build()  # type: ignore[operator]


def test_mask_scopes_nest_and_belong_to_their_thread() -> None:
    outer, inner = torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    seen: list[Tensor | None] = []
    with powernorm.padding_mask(outer):
        with powernorm.padding_mask(inner):
            assert current_padding_mask() is inner
            with powernorm.padding_mask(None):
                assert current_padding_mask() is None
        assert current_padding_mask() is outer
        thread = threading.Thread(target=lambda: seen.append(current_padding_mask()))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="boom"), powernorm.padding_mask(inner):
            raise RuntimeError("boom")
        assert current_padding_mask() is outer
    assert current_padding_mask() is None
    assert seen == [None]


def test_explicit_mask_wins_over_the_scope() -> None:
    x = torch.randn(2, 3, 8)
    explicit = torch.tensor([[False, True, True], [False, False, True]])
    a, b = powernorm.BatchNorm(8), powernorm.BatchNorm(8)
    with powernorm.padding_mask(~explicit):
        torch.testing.assert_close(a(x, explicit), b.train()(x, explicit))
    torch.testing.assert_close(a.running_mean, x[~explicit].mean(0))


def test_agrees_with_torch_batch_norm_and_loads_its_checkpoint() -> None:
    ours, theirs = powernorm.BatchNorm(8, start="torch"), nn.BatchNorm1d(8)
    for t in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(t)) * 3 + 2
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    fresh = powernorm.BatchNorm(8)
    fresh.load_state_dict(theirs.state_dict())
    x = torch.randn(16, 8)
    torch.testing.assert_close(fresh.eval()(x), theirs.eval()(x))


def test_loads_a_checkpoint_of_the_released_power_norm() -> None:
    norm = powernorm.PowerNorm(8, backward_momentum=0.05, warmup_steps=3)
    for t in range(5):
        step(norm, torch.randn(4, 8, generator=torch.Generator().manual_seed(t)), None)
    released = {
        "weight": norm.weight.detach(),
        "bias": norm.bias.detach(),
        "running_phi": norm.running_second_moment.reshape(1, 8, 1, 1),
        "ema_gz": norm.running_gradient_moment.reshape(1, 8, 1, 1) / 0.05,
        "iters": norm.num_batches_tracked.reshape(1),
    }
    fresh = powernorm.PowerNorm(8, backward_momentum=0.05, warmup_steps=3)
    fresh.load_state_dict(released)
    assert int(fresh.num_batches_tracked) == 5
    torch.testing.assert_close(fresh.running_gradient_moment, norm.running_gradient_moment)
    x = torch.randn(4, 8)
    torch.testing.assert_close(step(fresh, x, None), step(norm, x, None))


def test_loads_a_checkpoint_of_the_released_batch_norm() -> None:
    norm = powernorm.RegularizedBatchNorm(8)
    state = dict(norm.state_dict(), batch_mean=torch.zeros(8), batch_var=torch.ones(8))
    state["running_mean"] = torch.full((1, 8, 1, 1), 3.0)
    norm.load_state_dict(state)
    assert torch.equal(norm.running_mean, torch.full((8,), 3.0))


def test_converting_to_sync_batch_norm_leaves_ours_alone() -> None:
    model = nn.Sequential(powernorm.BatchNorm(8), powernorm.PowerNorm(8))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted[0]) is powernorm.BatchNorm


@pytest.mark.parametrize("module", [nn.Linear(6, 4), nn.Conv1d(6, 4, 3)])
def test_centered_weight(module: nn.Module) -> None:
    center_weight(module)
    torch.testing.assert_close(module.weight.flatten(1).mean(1), torch.zeros(4))
    module.weight.square().sum().backward()
    assert module.parametrizations.weight.original.grad is not None
    with pytest.raises(powernorm.InputError, match="LayerNorm"):
        center_weight(nn.LayerNorm(3))


def test_penalty_forgets_what_it_should_and_nothing_else() -> None:
    norm = powernorm.RegularizedBatchNorm(8)
    a, b = (torch.randn(6, 8, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        for _ in range(5):
            norm(a)
    norm.train()
    loss_a = norm(a).sum() + norm.penalty()
    single = norm.penalty().item()
    loss_b = norm(b).sum()
    loss_a.backward()  # B's penalty has not been asked for yet
    (loss_b + norm.penalty()).backward()
    fresh = powernorm.RegularizedBatchNorm(8)
    fresh(a)
    assert fresh.penalty().item() == single
    assert not norm.has_penalty


def test_penalty_chain_does_not_grow_when_nobody_asks() -> None:
    norm = powernorm.RegularizedBatchNorm(8)
    for _ in range(3):
        norm(torch.randn(6, 8, requires_grad=True)).sum().backward()
        assert not norm.has_penalty


def test_penalty_belongs_to_its_forward_whatever_happens_to_the_buffers() -> None:
    x = torch.randn(30, 4)
    values = []
    for disturbed in (False, True):
        norm = powernorm.RegularizedBatchNorm(4)
        norm(x)
        if disturbed:
            norm.running_mean.fill_(100.0)
        values.append(norm.penalty().item())
    assert values[0] == values[1]


def test_a_logged_penalty_does_not_disturb_later_steps() -> None:
    norm = powernorm.RegularizedBatchNorm(4)
    x = torch.randn(30, 4)
    norm(x)
    norm.penalty().item()
    norm(x).sum().backward()
    assert not norm.has_penalty
    (norm(x).sum() + norm.penalty()).backward()
    with torch.inference_mode(), pytest.raises(powernorm.InputError, match="no training-mode"):
        norm.penalty()
    y = norm(x)
    with torch.inference_mode():
        logged = norm.penalty().item()
    assert norm.penalty().requires_grad
    assert norm.penalty().item() == logged
    (y.sum() + norm.penalty()).backward()


def test_penalties_of_held_micro_batches_are_over_with_their_backward() -> None:
    norm = powernorm.RegularizedBatchNorm(4)
    with powernorm.training_step(norm):
        norm(torch.randn(30, 4)).sum().backward()
        assert not norm.has_penalty
        (norm(torch.randn(30, 4)).sum() + norm.penalty()).backward()
        assert not norm.has_penalty


def test_penalty_of_frozen_and_skipped_layers() -> None:
    model = nn.ModuleList(powernorm.RegularizedBatchNorm(8) for _ in range(3))
    model[0].eval()
    x = torch.randn(6, 8)
    model[0](x), model[1](x)
    torch.testing.assert_close(powernorm.penalty(model, "token_sum"), model[1].penalty())
    with pytest.raises(powernorm.InputError, match="num_tokens is 0"):
        powernorm.penalty(model, num_tokens=0)
    assert powernorm.penalty(model, num_tokens=torch.tensor(0)).isfinite()
    with pytest.raises(powernorm.InputError, match="no training-mode forward"):
        powernorm.penalty(nn.ModuleList([powernorm.RegularizedBatchNorm(8)]), num_tokens=1)


@pytest.mark.parametrize("name", ["pn", "rbn", "brn", "mabn"])
def test_state_moves_behind_raw_input_and_frozen_weights(name: str) -> None:
    norm = powernorm.build_norm(name, 8, affine=False)
    head = nn.Linear(8, 2)
    head(norm(torch.randn(6, 8))).sum().backward()
    assert int(norm.num_batches_tracked) == 1


def test_one_batch_out_of_range_does_not_poison_the_buffers() -> None:
    norm = powernorm.BatchNorm(2)
    norm(torch.randn(8, 2, dtype=torch.float64) * 1e25)
    norm(torch.randn(8, 2))
    assert norm.running_var.isfinite().all()
    assert int(norm.num_nonfinite_batches) == 1


def test_buffers_written_from_outside_end_the_warm_up() -> None:
    """A data-parallel wrapper broadcasts buffers in place; every rank must see the same stage."""
    norm = powernorm.PowerNorm(8, warmup_steps=5)
    step(norm, torch.randn(4, 8), None)
    with torch.no_grad():
        norm.num_batches_tracked.fill_(10)
    norm(torch.randn(4, 8))
    assert norm.stage == 1
    fresh = powernorm.PowerNorm(8, warmup_steps=3)
    for t in range(3):
        with torch.no_grad():
            fresh.num_batches_tracked.add_(0)  # a broadcast of the same value
        assert fresh.stage == 0
        step(fresh, torch.randn(4, 8), None)
        assert int(fresh.num_batches_tracked) == t + 1
    assert fresh.stage == 1


def test_steps_without_tokens_do_not_count_towards_the_warm_up() -> None:
    norm = powernorm.PowerNorm(8, warmup_steps=2)
    padding = torch.ones(4, dtype=torch.bool)
    for mask in (None, padding, padding, padding):
        step(norm, torch.randn(4, 8), mask)
    assert norm.stage == 0
    step(norm, torch.randn(4, 8), None)
    assert norm.stage == 1


def test_loading_on_the_meta_device_leaves_no_meta_buffer() -> None:
    norm = powernorm.BatchNorm(4, device="meta")
    norm.load_state_dict(nn.BatchNorm1d(4).state_dict(), assign=True)
    assert all(b.device.type == "cpu" for b in norm.buffers())
    used = powernorm.BatchNorm(4)
    used(torch.full((3, 4), float("nan")))
    used.load_state_dict(nn.BatchNorm1d(4).state_dict())
    assert int(used.num_nonfinite_batches) == 0


def test_checkpoint_of_another_width_names_the_key() -> None:
    with pytest.raises(RuntimeError, match="size mismatch for running_mean"):
        powernorm.BatchNorm(4).load_state_dict(powernorm.BatchNorm(8).state_dict())


def test_loads_a_checkpoint_of_the_released_mabn() -> None:
    norm = powernorm.MovingAverageBatchNorm(8, window=2, warmup_steps=0)
    for t in range(4):
        step(norm, torch.randn(4, 8, generator=torch.Generator().manual_seed(t)), None)
    released = {
        "weight": norm.weight.detach(),
        "bias": norm.bias.detach(),
        "running_var": norm.running_second_moment.reshape(1, 8, 1, 1),
        "buffer_x2": norm.window_second_moment.reshape(2, 8),
        "buffer_gz": norm.window_gradient_moment.reshape(2, 8),
        "iters": norm.num_batches_tracked.reshape(1),
    }
    fresh = powernorm.MovingAverageBatchNorm(8, window=2, warmup_steps=0)
    fresh.load_state_dict(released)
    x = torch.randn(4, 8)
    torch.testing.assert_close(step(fresh, x, None), step(norm, x, None))


def test_float_masks_are_told_how_to_mend() -> None:
    with pytest.raises(powernorm.InputError, match="mask < 0"):
        powernorm.BatchNorm(8)(torch.zeros(2, 3, 8), torch.zeros(2, 3))


def test_a_nonfinite_first_batch_leaves_no_trace_in_the_warm_up() -> None:
    norm = powernorm.PowerNorm(8, groups=None, warmup_steps=9)
    step(norm, torch.full((4, 8), float("nan")), None)
    for value in (3.0, 5.0):
        step(norm, torch.full((4, 8), value), None)
    torch.testing.assert_close(norm.running_second_moment, torch.full((8,), 17.0))


@pytest.mark.parametrize("name", [*filter(uses_batch_statistics, powernorm.NORMS)])
def test_built_and_used_under_inference_mode(name: str) -> None:
    with torch.inference_mode():
        norm = powernorm.build_norm(name, 8).eval()
        assert norm(torch.randn(2, 3, 8)).isfinite().all()


@pytest.mark.parametrize("asked", [False, True])
def test_a_diagnosis_between_forward_and_backward_leaves_the_penalty(asked: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), powernorm.RegularizedBatchNorm(4), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    batches = [torch.randn(6, 4) for _ in range(4)]
    gradients = []
    for one in (model, twin):
        loss = one(batches[0]).square().mean()
        penalty = one[1].penalty() if asked else None
        if one is model:
            powernorm.training_inference_discrepancy(one, batches)
            powernorm.diagnose(one, batches)
        (loss + (one[1].penalty() if penalty is None else penalty)).backward()
        # And the next step knows of none of it.
        (one(batches[1]).square().mean() + one[1].penalty()).backward()
        gradients.append([parameter.grad for parameter in one.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
