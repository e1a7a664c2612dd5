"""Functions over a model's norms, the registry, masks of scopes, checkpoints of released code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import powernorm
from cases import step
from powernorm.norms import center_weight, check_norm_options
from refusals import refuses


def test_penalty_scale() -> None:
    model = nn.Sequential(powernorm.RegularizedBatchNorm(8), powernorm.RegularizedBatchNorm(8))
    model(torch.randn(4, 5, 8))
    total = powernorm.penalty(model, reduction="token_sum")
    torch.testing.assert_close(total, model[0].penalty() + model[1].penalty())
    torch.testing.assert_close(powernorm.penalty(model, "mean", num_tokens=20), total / 20)
    refuses("num_tokens", powernorm.penalty, model)
    refuses("'sum'", powernorm.penalty, model, reduction="sum")
    assert float(powernorm.penalty(nn.Linear(2, 2), num_tokens=1)) == 0


@pytest.mark.parametrize("count", [0, -8, 0.5, float("nan"), float("inf"), True, "many"])
def test_number_of_tokens(count: object) -> None:
    model = nn.Sequential(powernorm.RegularizedBatchNorm(8))
    model(torch.randn(5, 8))
    refuses(f"num_tokens is {count!r}, expected a number", powernorm.penalty, model, "mean", count)


def test_no_model() -> None:
    calls = (
        lambda: powernorm.penalty(None, "token_sum"),  # type: ignore[arg-type]
        lambda: powernorm.training_step(None).__enter__(),  # type: ignore[arg-type]
        lambda: powernorm.set_loss_scale(None),  # type: ignore[arg-type]
    )
    for call in calls:
        refuses("model is None, expected a torch", call)
    with pytest.raises(powernorm.InputError, match="scale is 'x', expected a finite number"):
        powernorm.set_loss_scale(nn.Linear(2, 2), "x")  # type: ignore[arg-type]


def test_penalty_of_a_shared_layer_and_of_micro_batches() -> None:
    norm = powernorm.RegularizedBatchNorm(8)
    refuses("needs a training-mode forward", norm.penalty)
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
    refuses("needs a training-mode forward", norm.penalty)


@pytest.mark.filterwarnings("ignore:padding_mask of shape")  # said once a process
def test_no_penalty_without_valid_tokens() -> None:
    norm = powernorm.RegularizedBatchNorm(8)
    x = torch.randn(2, 3, 8, requires_grad=True)
    y = norm(x, torch.ones(2, 3, dtype=torch.bool))
    assert norm.penalty().item() == 0
    (grad,) = torch.autograd.grad(norm.penalty() + 0 * y.sum(), x)
    assert not grad.any()


def test_unknown_names_and_options() -> None:
    refuses(r"unknown norm 'bnn', known are ln, .*'bn'", powernorm.build_norm, "bnn", 8)
    refuses("no option 'alpha', it takes eps, momentum", powernorm.build_norm, "pn", 8, alpha=0.9)
    refuses(r"momentum of bn is 'x' \(str\)", check_norm_options, "bn", {"momentum": "x"})
    refuses(r"warmup_steps of pn is 1.5 \(float\)", check_norm_options, "pn", {"warmup_steps": 1.5})
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
        (lambda: powernorm.SeeDNorm(6, num_heads=4), "divisor of the 6 features"),
        (lambda: powernorm.DyISRU(4, spread=0.0), "spread is 0.0"),
        (lambda: powernorm.UnifiedNorm(4, window=(1, 2, 3)), "a pair for both passes"),
        (lambda: powernorm.UnifiedNorm(4, window=[4, 0]), "window is 0"),
        (lambda: powernorm.TaperNorm(4, start_step=5, end_step=5), "end_step is 5"),
        (lambda: powernorm.TaperNorm(4, kind="batch"), "kind is 'batch'"),
        (lambda: powernorm.ProgressiveRepBatchNorm(4, start_ratio=1.5), r"in \[0, 1\]"),
        (lambda: powernorm.ProgressiveRepBatchNorm(4, evaluation="ln"), "'rep' or 'blend'"),
    ],
)
def test_bad_arguments(build: object, message: str) -> None:
    refuses(message, build)


def test_explicit_mask_wins_over_the_scope() -> None:
    x = torch.randn(2, 3, 8)
    explicit = torch.tensor([[False, True, True], [False, False, True]])
    a, b = powernorm.BatchNorm(8), powernorm.BatchNorm(8)
    with powernorm.padding_mask(~explicit):
        torch.testing.assert_close(a(x, explicit), b.train()(x, explicit))
    torch.testing.assert_close(a.running_mean, x[~explicit].mean(0))


def released_power_norm(norm: powernorm.PowerNorm) -> dict[str, Tensor]:
    return {
        "running_phi": norm.running_second_moment.reshape(1, 8, 1, 1),
        "ema_gz": norm.running_gradient_moment.reshape(1, 8, 1, 1) / 0.05,
    }


def released_mabn(norm: powernorm.MovingAverageBatchNorm) -> dict[str, Tensor]:
    return {
        "running_var": norm.running_second_moment.reshape(1, 8, 1, 1),
        "buffer_x2": norm.window_second_moment.reshape(2, 8),
        "buffer_gz": norm.window_gradient_moment.reshape(2, 8),
    }


@pytest.mark.parametrize(
    ("name", "options", "buffers"),
    [
        ("pn", {"backward_momentum": 0.05, "warmup_steps": 3}, released_power_norm),
        ("mabn", {"window": 2, "warmup_steps": 0}, released_mabn),
    ],
)
def test_loads_a_checkpoint_of_the_released_code(
    name: str, options: dict[str, Any], buffers: Callable[[Any], dict[str, Tensor]]
) -> None:
    norm, fresh = (powernorm.build_norm(name, 8, **options) for _ in range(2))
    for t in range(5):
        step(norm, torch.randn(4, 8, generator=torch.Generator().manual_seed(t)), None)
    affine = {"weight": norm.weight.detach(), "bias": norm.bias.detach()}
    count = {"iters": norm.num_batches_tracked.reshape(1)}
    fresh.load_state_dict({**affine, **buffers(norm), **count})
    torch.testing.assert_close([*fresh.buffers()], [*norm.buffers()])
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
    refuses("LayerNorm", center_weight, nn.LayerNorm(3))


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
    with torch.inference_mode(), pytest.raises(powernorm.InputError, match="needs a training-mode"):
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
    refuses("num_tokens is 0", powernorm.penalty, model, num_tokens=0)
    assert powernorm.penalty(model, num_tokens=torch.tensor(0)).isfinite()
    with pytest.raises(powernorm.InputError, match="needs a training-mode forward"):
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


def test_checkpoint_of_another_width_names_the_key() -> None:
    with pytest.raises(RuntimeError, match="size mismatch for running_mean"):
        powernorm.BatchNorm(4).load_state_dict(powernorm.BatchNorm(8).state_dict())


def test_a_nonfinite_first_batch_leaves_no_trace_in_the_warm_up() -> None:
    norm = powernorm.PowerNorm(8, groups=None, warmup_steps=9)
    step(norm, torch.full((4, 8), float("nan")), None)
    for value in (3.0, 5.0):
        step(norm, torch.full((4, 8), value), None)
    torch.testing.assert_close(norm.running_second_moment, torch.full((8,), 17.0))


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
