"""ν of PowerNorm follows the loss scale of float16 training."""

from typing import Any

import torch
from torch import nn

from powernorm.integrations.lightning import LossScaleFollower
from powernorm.norms import PowerNorm, build_norm


class Scaler:
    """Stands for a GradScaler whose scale is set by hand."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


def trained(scales: list[float], *, follow: bool) -> PowerNorm:
    """A PowerNorm after updates whose loss was scaled, as the steps of a GradScaler are."""
    norm = build_norm("pn", 4, warmup_steps=0)
    assert isinstance(norm, PowerNorm)
    scaler = Scaler(scales[0])
    follower = LossScaleFollower(norm, scaler)  # type: ignore[arg-type]
    nothing: Any = None
    follower.on_train_start(nothing, nothing)
    generator = torch.Generator().manual_seed(0)
    for scale, after in zip(scales, [*scales[1:], scales[-1]], strict=True):
        x = torch.randn(16, 4, generator=generator, requires_grad=True)
        weights = torch.randn(16, 4, generator=generator)
        ((norm(x) * weights).sum() * scale).backward()
        scaler.scale = after  # what scaler.update() does after the step
        if follow:
            follower.on_train_batch_end(nothing, nothing, nothing, nothing, 0)
    return norm


def test_backward_statistics_follow_the_loss_scale() -> None:
    scales = [8.0, 8.0, 16.0, 4.0, 4.0]
    reference = trained([1.0] * 5, follow=False).running_gradient_moment
    got = trained(scales, follow=True).running_gradient_moment
    torch.testing.assert_close(got / scales[-1], reference)
    left_alone = trained(scales, follow=False).running_gradient_moment
    assert not torch.allclose(left_alone / scales[-1], reference, rtol=1e-2)


def test_an_overflow_halves_scale_and_statistics() -> None:
    norm = nn.Sequential(build_norm("pn", 4, warmup_steps=0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    follower = LossScaleFollower(norm, scaler)
    nothing: Any = None
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    follower.on_train_start(nothing, nothing)

    def step(factor: float) -> None:
        loss = (norm(torch.randn(8, 4)) * torch.randn(8, 4)).sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        follower.on_train_batch_end(nothing, nothing, nothing, nothing, 0)

    # The first forward makes the scaler's scale; the follower must not take that for a change.
    step(1.0)
    before = norm[0].running_gradient_moment.clone()
    assert before.abs().max() > 1
    step(float("inf"))
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(norm[0].running_gradient_moment, before / 2)
