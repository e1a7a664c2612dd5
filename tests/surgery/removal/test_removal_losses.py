"""Distillation, and the anchor of the final norm's scale."""

from __future__ import annotations

import pytest
import torch

from norms.test_goldens import Golden, check
from powernorm.errors import InputError
from powernorm.surgery.removal import deviation_anchor, hidden_state_error, logit_divergence
from refusals import refuses


def test_anchor_is_that_of_the_released_training() -> None:
    golden = Golden("fakeln_aux_loss")
    for step in range(golden.num_steps):
        x = golden.tokens("x", step).requires_grad_()
        ordinary = ~torch.from_numpy(golden.arrays["eos_mask"][step])
        ordinary[:, 0] = False
        penalty, target = deviation_anchor(x, eps=golden.meta["eps"], ordinary=ordinary)
        penalty.backward()
        assert x.grad is not None
        check("penalty", penalty, golden.row("penalty", step))
        check("target", target, golden.row("target", step))
        check("grad_x", x.grad, golden.tokens("grad_x", step))


def test_anchor_leaves_padding_out() -> None:
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    valid = torch.tensor([[True, True, False, False], [True, True, True, False]])
    penalty, _ = deviation_anchor(x, valid=valid, center=False)
    alone, _ = deviation_anchor(x[valid], center=False)
    torch.testing.assert_close(penalty, alone)


def test_divergence_is_that_of_the_distributions_and_leaves_padding_out() -> None:
    ours, theirs = torch.randn(2, 2, 3, 5, dtype=torch.float64).unbind()
    valid = torch.tensor([[True, True, False], [True, False, False]])
    p, q = theirs.float()[valid].softmax(-1), ours.float()[valid].softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(logit_divergence(ours, theirs, valid), expected)


def test_temperature_keeps_the_size_of_small_gradients() -> None:
    """With T² in front the divergence of nearly equal logits hardly depends on T."""
    theirs = 0.1 * torch.randn(64, 7)
    ours = theirs + 0.01 * torch.randn(64, 7)
    hot, cold = (logit_divergence(ours, theirs, temperature=t) for t in (3.0, 1.0))
    assert float(hot / cold) == pytest.approx(1.0, abs=0.1)


def test_hidden_states_count_alike_whatever_their_scale() -> None:
    states = [torch.randn(4, 6, 8), 100 * torch.randn(4, 6, 8)]
    wrong = [state + 0.1 * state.std() * torch.randn_like(state) for state in states]
    errors = [
        hidden_state_error([ours], [state]) for ours, state in zip(wrong, states, strict=True)
    ]
    assert float(errors[0] / errors[1]) == pytest.approx(1.0, abs=0.3)
    both = hidden_state_error(wrong, states)
    torch.testing.assert_close(both, torch.stack(errors).mean())


def test_other_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="the same batch and the same classes"):
        logit_divergence(torch.randn(2, 3), torch.randn(2, 4))
    refuses("both have to run alike", hidden_state_error, [torch.randn(2)], [])


def test_no_gradient_goes_to_the_teacher() -> None:
    ours, theirs = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    (logit_divergence(ours, theirs) + hidden_state_error([ours], [theirs])).backward()
    assert theirs.grad is None
