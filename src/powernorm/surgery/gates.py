"""A norm with a gate: the norm inside can be any, the gate stays."""

from __future__ import annotations

from torch import Tensor, nn

from powernorm.inspection.trials import ACTIVATIONS, Gate
from powernorm.ops.arrays import accumulation_dtype


class GatedNorm(nn.Module):
    """A norm whose input, or output, is multiplied by a gate.

    `y = norm(x ⊙ f(gate))` or `y = norm(x) ⊙ f(gate)`, as in Mamba 2 and Qwen3-Next. It has no
    `weight`: fused kernels of a model, which would compute the old norm by that, fail.

    Args:
        norm: maps (..., C) to the same shape.
        gate: whether the gate is before or after the norm, and the name of f.
    """

    def __init__(self, norm: nn.Module, gate: Gate) -> None:
        super().__init__()
        self.norm = norm
        self.gate = gate

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize x, (..., C).

        Args:
            x: the input.
            gate: of x's shape; None leaves it out.
        """
        if gate is None:
            y: Tensor = self.norm(x)
        elif self.gate.place == "before":
            y = self.norm(self._gated(x, gate))
        else:
            y = self._gated(self.norm(x), gate)
        return y

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        # As such norms do: half precision is multiplied in float32.
        dtype = accumulation_dtype(x)
        return (x.to(dtype) * ACTIVATIONS[self.gate.activation](gate.to(dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        """Return place and function of the gate."""
        return f"gate={self.gate.activation} {self.gate.place}"
