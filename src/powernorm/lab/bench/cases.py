"""What is measured: shapes, types, share of padding, direction."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

import torch

Direction = Literal["forward", "forward+backward", "evaluation"]
DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Case:
    """One comparison of all providers.

    Attributes:
        tokens: number of tokens, padding included.
        features: C.
        dtype: name of the input's type.
        padding: share of padded tokens; those without a mask treat padding as tokens.
        direction: `forward` and `forward+backward` in training mode, `evaluation` without
            gradients.
    """

    tokens: int
    features: int
    dtype: str = "float32"
    padding: float = 0.0
    direction: Direction = "forward+backward"

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes that no implementation can avoid: each matrix once from or to memory."""
        # x, y; and x, the gradients of y and of x.
        matrices = 5 if self.direction == "forward+backward" else 2
        return matrices * self.tokens * self.features * self.itemsize

    @property
    def label(self) -> str:
        """A short name for tables."""
        padding = f", {self.padding:.0%} padding" if self.padding else ""
        return f"{self.tokens}×{self.features} {self.dtype}{padding}, {self.direction}"


_SHAPES: Final = ((4096, 512), (8192, 768), (8192, 1024))

_TRAINING: Final[tuple[Direction, ...]] = ("forward", "forward+backward")

GRIDS: Final[dict[str, tuple[Case, ...]]] = {
    "quick": (Case(64, 512), Case(4096, 512)),
    "targets": (
        *(Case(*shape, padding=padding) for shape, padding in product(_SHAPES, (0.0, 0.25))),
        *(Case(*shape, dtype="bfloat16") for shape in _SHAPES),
        *(Case(*shape, direction="evaluation") for shape in _SHAPES),
        Case(64, 512),
    ),
    "rivals": (Case(4096, 512), Case(4096, 512, padding=0.25), Case(8192, 1024)),
    "grid": tuple(
        Case(tokens, features, dtype, padding, direction)
        for tokens, features, dtype, padding, direction in product(
            (64, 1024, 4096, 16384),
            (128, 512, 768, 1024, 4096),
            ("float32", "bfloat16"),
            (0.0, 0.25),
            _TRAINING,
        )
        if tokens * features <= 2**24
    ),
}
"""Named sets of cases; `targets` are those that the project promises figures for."""
