"""Losses for training a model while its norms are removed: distillation, and an anchor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.errors import InputError


def logit_divergence(
    student: Tensor, teacher: Tensor, valid: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Return the mean over positions of KL(teacher ‖ student), in nats (Hinton et al. 2015).

    With a temperature T both are softmaxes of logits / T, and the divergence is multiplied by T²,
    so that its gradient keeps its size.

    Args:
        student: logits, (…, classes).
        teacher: logits of the original, the same shape; they get no gradient.
        valid: positions that count, (…) bool; None means all.
        temperature: T, > 0.

    >>> logits = torch.randn(2, 3, 5)
    >>> logit_divergence(logits, logits).item()
    0.0
    """
    if student.shape != teacher.shape:
        raise InputError(
            f"the logits have the shapes {tuple(student.shape)} and {tuple(teacher.shape)}: "
            "student and teacher need the same batch and the same classes"
        )
    ours, theirs = (
        F.log_softmax(logits.flatten(0, -2).float() / temperature, -1)
        for logits in (student, teacher.detach())
    )
    each = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    return temperature**2 * _mean(each, None if valid is None else valid.flatten())


def hidden_state_error(
    student: Sequence[Tensor], teacher: Sequence[Tensor], valid: Tensor | None = None
) -> Tensor:
    """Return the squared error of hidden states, each relative to the variance of the original's.

    Args:
        student: states, (…, C) each.
        teacher: states of the original, in the same order; they get no gradient.
        valid: positions that count, (…) bool; None means all. States of another shape count whole.

    >>> state = torch.randn(2, 3, 4)
    >>> hidden_state_error([state], [state]).item()
    0.0
    """
    if not student or len(student) != len(teacher):
        raise InputError(
            f"there are {len(student)} hidden states of the student and {len(teacher)} of the "
            "teacher: both have to run alike"
        )
    errors = [
        _relative_error(*_chosen(ours, theirs.detach(), valid))
        for ours, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(errors).mean()


def deviation_anchor(
    x: Tensor,
    *,
    center: bool = True,
    eps: float = 1e-5,
    valid: Tensor | None = None,
    ordinary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the spread of the tokens' deviations in front of the final norm, as a penalty.

    `mean over valid tokens of (σ_t - σ̂)²` with `σ_t = sqrt(var x_t + eps)` over the features, and
    σ̂, a constant, the mean of σ_t over the ordinary tokens. Without it the stream's scale, and with
    it the logits, can grow without limit once the final norm is a constant.

    Args:
        x: input of the final norm, (…, C).
        center: False for RMSNorm, `σ_t = sqrt(mean x_t² + eps)`.
        eps: eps of the norm.
        valid: positions that count, (…) bool; None means all.
        ordinary: positions that define the target: in the authors' code those that are neither
            first nor the end of a text; None means all valid ones.

    Returns:
        The penalty and σ̂, both 0-d; σ̂ has no gradient.

    >>> penalty, target = deviation_anchor(torch.tensor([[1.0, 3.0], [2.0, 6.0]]), eps=0.0)
    >>> penalty.item(), target.item()
    (0.25, 1.5)
    """
    wide = x if x.dtype is torch.float64 else x.float()
    centered = wide - wide.mean(-1, keepdim=True) if center else wide
    deviations = (centered.square().mean(-1) + eps).sqrt()
    chosen = valid if ordinary is None else ordinary
    if chosen is not None and valid is not None:
        chosen = chosen & valid
    target = _mean(deviations.detach(), chosen)
    return _mean((deviations - target).square(), valid), target


def _mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean of the valid values, 0 if there are none."""
    if valid is None:
        return values.mean()
    return torch.where(valid, values, 0.0).sum() / valid.sum().clamp(min=1)


def _chosen(ours: Tensor, theirs: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    if valid is None or ours.shape[:-1] != valid.shape:
        return ours, theirs
    return ours[valid], theirs[valid]


def _relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    return F.mse_loss(ours.float(), theirs.float()) / theirs.float().var().clamp(min=1e-12)
