"""What the project promises, as ratios to torch's LayerNorm in the same run on two threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from powernorm.lab.bench.providers import BASELINE
from powernorm.lab.bench.rows import Row


@dataclass(frozen=True)
class Target:
    """A norm on a kind of case must take at most `limit` times what a rival takes."""

    norm: str
    limit: float
    rival: str = BASELINE
    dtype: str = "float32"
    direction: str = "forward+backward"
    small: bool = False


_LARGE: Final = {
    "pn-only": 0.75,
    "pn": 0.85,
    "pn-static": 1.1,
    "pnv": 1.2,
    "bn": 1.3,
    "rbn": 1.3,
    "adanorm": 1.0,
    "ln-simple": 1.0,
    "rms": 0.9,
}
TARGETS: Final = (
    *(Target(norm, limit) for norm, limit in _LARGE.items()),
    Target("bn", 0.85, "torch BatchNorm1d"),
    Target("rbn", 0.85, "torch BatchNorm1d"),
    Target("rms", 0.25, "torch RMSNorm"),
    *(Target(norm, 1.0, dtype="bfloat16") for norm in _LARGE),
    *(Target(norm, 1.5, small=True) for norm in _LARGE),
    *(Target(norm, 1.0, direction="evaluation") for norm in ("bn", "rbn", "pnv", "pn-only")),
)
SMALL_TOKENS: Final = 256


@dataclass(frozen=True)
class Outcome:
    """A target on one case: what was measured."""

    target: Target
    row: Row
    ratio: float

    @property
    def met(self) -> bool:
        """Is the ratio at most the limit?"""
        return self.ratio <= self.target.limit


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """Every target on every case that was measured with kernels on the CPU."""
    found = []
    for target in TARGETS:
        for row in rows:
            if row.norm == target.norm and row.backend == "cpu" and _concerns(target, row):
                rival = next(
                    (r for r in rows if r.provider == target.rival and r.case == row.case), None
                )
                if rival is not None:
                    found.append(Outcome(target, row, round(row.median_us / rival.median_us, 3)))
    return found


def _concerns(target: Target, row: Row) -> bool:
    small = row.tokens <= SMALL_TOKENS
    return (target.dtype, target.direction, target.small) == (row.dtype, row.direction, small)


def mask_costs(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """What a padding mask costs: (row with the mask, its ratio over that without)."""
    found = []
    for row in rows:
        if row.padding and row.backend != "torch":
            for other in rows:
                same = (other.provider, other.tokens, other.features, other.dtype, other.direction)
                own = (row.provider, row.tokens, row.features, row.dtype, row.direction)
                if same == own and not other.padding:
                    # Both over LayerNorm of their own rounds, for they were not measured together.
                    found.append((row, round(row.ratio / other.ratio, 3)))
    return found
