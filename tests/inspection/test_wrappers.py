"""Wrappers around torch's norms, and subclasses of them, are recognized by their computation."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm
from powernorm.inspection.finder import FoundNorm, find_norms

WIDTH = 8


class Wrapper(nn.Module):
    """BatchNorm1d of the last dimension, as PatchTST has it."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(x.transpose(1, 2)).transpose(1, 2)
        return y


class ReluBatchNorm(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class TimeBatchNorm(Wrapper):
    """Features second."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(x)
        return y


class OnePlusBatchNorm(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        n = self.bn
        scale = 1 + n.weight
        y = F.batch_norm(x.transpose(1, 2), n.running_mean, n.running_var, scale, n.bias)
        return y.transpose(1, 2)


class GhostBatchNorm(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(GhostBatchNorm, self).forward(part) for part in x.split(128)])


class SingleBatchNorm(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == 1 else super().forward(x)


class GatedBatchNorm(Wrapper):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * gate


class Ghost(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Ghost, self).forward(part) for part in x.split(128)])


class Patient(nn.BatchNorm1d):
    """Leaves out single values, which torch refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == 1 and self.training else super().forward(x)


class Masked(nn.BatchNorm1d):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if mask is None else y * mask


class Open(nn.LayerNorm):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return super().forward(x) + sum(more)


class Capped(nn.BatchNorm1d):
    """Differs where few values come; random numbers reach 4 or so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-20, 20)


class CappedRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (64,), self.weight).clamp(-6, 6)


class Plain(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class OnePlusLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), 1 + self.ln.weight, self.ln.bias)


class ReluLayerNorm(OnePlusLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ln(x)
        return y.relu()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight
        return y + torch.randn_like(y) if self.training else y


class AdaLayerNormZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.linear(condition).chunk(2, -1)
        y: Tensor = self.norm(x) * (1 + scale) + shift
        return y


class PreNorm(nn.Module):
    """Takes a mask and holds a block: no conditional norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.block(self.norm(x), mask)
        return y


def found(norm: nn.Module) -> dict[str, FoundNorm]:
    model = nn.Sequential(nn.Linear(4, WIDTH), norm, nn.Linear(WIDTH, 3))
    return {one.names[0]: one for one in find_norms(model)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("make", "name", "dim"),
    [
        (Wrapper, "1", -1),
        (ReluBatchNorm, "1.bn", 1),
        (TimeBatchNorm, "1.bn", 1),
        (GhostBatchNorm, "1.bn", 1),
        (SingleBatchNorm, "1.bn", 1),
        (GatedBatchNorm, "1.bn", 1),
        (ReluLayerNorm, "1.ln", -1),
        (lambda: Plain(WIDTH), "1", 1),
    ],
)
def test_the_norm_itself_is_taken(
    make: Callable[[], nn.Module], name: str, dim: int, device: str
) -> None:
    norms = found(make().to(device))
    assert list(norms) == [name]
    reading = norms[name].reading
    assert reading is not None
    assert reading.feature_dim == dim


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (OnePlusBatchNorm, "1.bn", "OnePlusBatchNorm does not call it"),
        (OnePlusLayerNorm, "1.ln", "OnePlusLayerNorm does not call it"),
        (lambda: Ghost(WIDTH), "1", "Ghost does more than BatchNorm1d of torch"),
        (lambda: Patient(WIDTH), "1", "Patient does more than BatchNorm1d of torch"),
        (lambda: Capped(WIDTH), "1", "Capped does more than BatchNorm1d of torch"),
        (CappedRMSNorm, "1", "neither LayerNorm nor RMSNorm"),
        (lambda: Masked(WIDTH), "1", "Masked also takes mask"),
        (lambda: Open(WIDTH), "1", "Open also takes *more"),
        (Noisy, "1", "something else in training"),
        (AdaLayerNormZero, "1", "computes its γ and β from condition"),
    ],
)
def test_what_computes_something_else_is_kept(
    make: Callable[[], nn.Module], name: str, reason: str
) -> None:
    norm = found(make())[name]
    assert norm.reading is None
    assert reason in norm.reason


def test_kinds_of_norms_with_conditions_and_of_blocks() -> None:
    assert found(AdaLayerNormZero())["1"].kind == "conditional"
    assert "1.norm" in found(PreNorm())


@pytest.mark.parametrize(
    "wrapper", [Wrapper, ReluBatchNorm, TimeBatchNorm, GhostBatchNorm, SingleBatchNorm]
)
def test_a_swap_to_batch_norm_keeps_the_values(wrapper: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), wrapper(), nn.Linear(WIDTH, 3))
    twin = copy.deepcopy(model)
    powernorm.swap(twin, "bn")
    for batch in (2, 300, 1):
        x = torch.randn(batch, WIDTH, 4) + 1
        torch.testing.assert_close(twin(x), model(x))
    for one in (model, twin):
        one.eval()
    torch.testing.assert_close(twin(x), model(x))


def test_a_norm_whose_parameters_are_in_a_container_has_a_row() -> None:
    class LayerNormalization(nn.Module):
        """Holds its parameters as Keras's do."""

        def __init__(self) -> None:
            super().__init__()
            self.held = nn.ParameterDict({"gamma": torch.ones(WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, x.shape[-1:], self.held["gamma"])

    norm = found(LayerNormalization())["1"]
    assert norm.reading is None
    assert "number of features of LayerNormalization cannot be read" in norm.reason
