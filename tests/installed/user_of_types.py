"""A user's file, which `mypy --strict` checks against the installed package; never run."""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import powernorm


class Block(nn.Module):
    """A user-defined layer with a norm of ours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = powernorm.PowerNorm(width, eps=1e-5)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        out: Tensor = self.linear(self.norm(x, padding))
        return out


def build(name: str, width: int) -> powernorm.Norm:
    """Return a norm by its short name."""
    return powernorm.build_norm(name, width)


def train_and_save(model: nn.Module, folder: Path, x: Tensor) -> nn.Module:
    """Swap, train a step, fold, save and load."""
    for row in powernorm.plan_swap(model, to="rbn").rows:
        print(row.name, row.action, row.reason)
    powernorm.swap(model, to="rbn")
    with powernorm.padding_mask(torch.zeros(4, 6, dtype=torch.bool)):
        loss: Tensor = model(x).square().mean()
    total: Tensor = loss + powernorm.penalty(model)
    torch.autograd.backward([total])
    powernorm.fold(model.eval(), x)
    powernorm.save(model, folder)
    return powernorm.load(folder, Block(8))


version: str = powernorm.__version__
assert_type(build("pn", 8).affine(), tuple[Tensor, Tensor])
powernorm.PowerNorm(8, epsilon=1e-5)  # type: ignore[call-arg]
powernorm.power_norm  # type: ignore[attr-defined]
