"""What is measured: encoders, inputs, types and engines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from powernorm.lab.models.choices import Placement
from powernorm.runs import placement_words

Engine = Literal["torch", "onnxruntime"]


@dataclass(frozen=True)
class Size:
    """One architecture.

    Attributes:
        features: size of the features.
        heads: of each attention.
        hidden: size inside the feed-forward networks.
        placement: where the norms stand.
        layers: number of layers.
    """

    features: int
    heads: int
    hidden: int
    placement: Placement
    layers: int = 6


@dataclass(frozen=True)
class InferenceCase:
    """One comparison of all providers.

    Attributes:
        size: the architecture.
        batch: sequences at a time.
        tokens: of each sequence.
        engine: who runs the model.
        dtype: name of the parameters' type.
    """

    size: Size
    batch: int
    tokens: int
    engine: Engine
    dtype: str

    @property
    def label(self) -> str:
        """A short name."""
        size = self.size
        return (
            f"{size.layers} layers × {size.features}, {placement_words(size.placement)}, "
            f"{self.batch}×{self.tokens} tokens, {self.engine} {self.dtype}"
        )


_PLACEMENTS: Final[tuple[Placement, ...]] = ("pre", "post")

SIZES: Final = tuple(
    Size(features, heads, hidden, placement)
    for features, heads, hidden in ((512, 8, 2048), (384, 12, 1536))
    for placement in _PLACEMENTS
)
INPUTS: Final = ((1, 16), (1, 128), (16, 64))
"""(batch, tokens)."""
WAYS: Final[tuple[tuple[Engine, str], ...]] = (
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("onnxruntime", "float32"),
)


def cases_of(size: Size) -> list[InferenceCase]:
    """The cases of one architecture."""
    return [InferenceCase(size, *inputs, *way) for inputs, way in product(INPUTS, WAYS)]
