"""Norms with a gate: the norm inside is swapped, and the gate stays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm
from powernorm.inspection.finder import find_norms

WIDTH = 16


class RMSNormGated(nn.Module):
    """The gate of Mamba 2, in front of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.eps = 1e-5

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * F.silu(gate)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class NormThenGate(RMSNormGated):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * gate.sigmoid()


class Mixer(nn.Module):
    def __init__(self, cls: type[RMSNormGated] = RMSNormGated) -> None:
        super().__init__()
        self.within = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = cls()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.within(x).chunk(2, -1)
        y: Tensor = self.out(self.norm(x.cumsum(1), gate))
        return y


class Mamba(nn.Module):
    """A stack like Mamba 2."""

    def __init__(self, cls: type[RMSNormGated] = RMSNormGated, mixer: Any = Mixer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mixer(cls) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.final = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        del padding_mask
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        y: Tensor = self.final(x)
        return y


class FusedMixer(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if not self.training else x * self.norm.weight


class Heads(Mixer):
    head_v_dim: int

    def __init__(self, cls: type[RMSNormGated]) -> None:
        super().__init__(cls)
        self.head_v_dim = WIDTH


GATED = ["layers.0.norm", "layers.1.norm"]


@pytest.mark.parametrize("cls", [RMSNormGated, NormThenGate])
def test_the_same_norm_gives_the_same_values_and_undo_the_old_one(cls: type[RMSNormGated]) -> None:
    model, x = Mamba(cls), torch.randn(2, 5, WIDTH)
    before, norm = model(x), model.layers[0].norm
    rows = {row.name: row for row in powernorm.plan_swap(model, "rms").rows}
    assert {rows[name].kind for name in GATED} == {"gated"}
    assert "its gate stays" in rows[GATED[0]].reason
    swapped = powernorm.swap(model, "rms")
    assert swapped.norms["layers.0.norm.norm"].weight is norm.weight
    torch.testing.assert_close(model(x), before)
    swapped.undo()
    assert model.layers[0].norm is norm
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("cls", [RMSNormGated, NormThenGate])
def test_it_trains_with_masks_calibrates_folds_and_saves(
    cls: type[RMSNormGated], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Mamba(cls)
    powernorm.swap(model, "rbn")
    x, mask = torch.randn(3, 6, WIDTH), torch.arange(6) >= torch.tensor([[6], [4], [3]])
    further = F.pad(x, (0, 0, 0, 2), value=7.0), F.pad(mask, (0, 2), value=True)
    twin = copy.deepcopy(model)
    for one, (data, padding) in ((model, (x, mask)), (twin, further)):
        one(data, padding)[:, :6].masked_fill(mask[..., None], 0).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    torch.testing.assert_close([*model.buffers()], [*twin.buffers()])
    batches = [(x,), (x.flip(1) + 1,)]
    rows = powernorm.calibrate(model, batches).rows
    assert [row.name for row in rows if row.action == "calibrate"] == [
        name for layer in range(2) for name in (f"norms.{layer}", f"layers.{layer}.norm.norm")
    ] + ["final"]
    for again in range(2):
        powernorm.save(model, tmp_path / str(again))
        loaded = powernorm.load(tmp_path / str(again), Mamba(cls)).eval()
        torch.testing.assert_close(loaded(x), model.eval()(x))
        if not again:
            report = powernorm.fold(model, x)
            rows = {row.name: row for row in report.rows}
            # A shift cannot pass a gate behind the norm, nor the sum in front of it.
            assert (rows["layers.0.norm.norm"].action == "fold") == (cls is RMSNormGated)


def test_a_gate_in_front_is_not_measured_as_if_there_were_none() -> None:
    model = Mamba()
    report = powernorm.diagnose(model, [torch.randn(2, 5, WIDTH) for _ in range(2)])
    assert {row.name for row in report.left_out} == set(GATED)


@pytest.mark.parametrize(
    ("mixer", "reason"), [(FusedMixer, "reads its weight"), (Heads, "queries, keys or values")]
)
def test_norms_that_cannot_change_are_kept_with_the_reason(mixer: Any, reason: str) -> None:
    found = {norm.names[0]: norm for norm in find_norms(Mamba(mixer=mixer))}
    assert found[GATED[0]].kind == "gated"
    assert found[GATED[0]].to_swap is None
    assert reason in found[GATED[0]].reason
