"""Rules of the four claims, written before the runs.

Losses are in nats a character of the test split, of the seeds after the tuning, paired by seed. An
interval is Student's t, 95 %, two-sided. A loss that is not finite leaves its seed out of the
comparison, and the number that is left is printed. No seed and no arm is added later.

- *LNS helps*: `lns` minus `pre`. Shown: the interval lies below 0. Contradicted: above 0.
- *HybridNorm is as good as pre and post*: `hybrid` minus the better one of `pre` and `post` by the
  mean. Shown: the interval's upper end is at most the margin. Contradicted: its lower end is above
  the margin.
- *Saturation predicts that DyT loses*: over all runs of DyT (four starts of α, five seeds)
  Spearman's correlation of the share of inputs with |α x| > 1 after a tenth of the training with
  the loss of the run minus that of `pre` with the same seed. Its interval is the 2.5 and
  97.5 percentiles of 2,000 bootstrap samples of the seeds. Shown: above 0. Contradicted: below 0.
- *Decay of γ by role*: `peri-input` minus `peri` (decay helps an input norm: below 0) and
  `peri-output` minus `peri` (it hurts an output norm: above 0); a decay of 2, of γ alone.
  Shown: both intervals lie there. Contradicted: one lies wholly on the other side.

Else a claim is *open*.
"""

from collections.abc import Iterable, Mapping
from random import Random
from statistics import mean, stdev
from typing import NamedTuple

from scipy import stats

MARGIN = 0.02
"""Nats a character, about one percent of the loss."""
Losses = Mapping[str, Mapping[int, float]]
"""Test loss by arm and seed."""


class Interval(NamedTuple):
    """A mean, or a correlation, and both ends of its interval."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        """Return it as text."""
        return f"{self.value:+.4f} ({self.low:+.4f} to {self.high:+.4f}, n = {self.count})"


def gap(losses: Losses, arm: str, other: str) -> Interval:
    """Return `arm` minus `other`, paired by seed."""
    both = [
        losses[arm][seed] - losses[other][seed] for seed in losses[arm] if seed in losses[other]
    ]
    middle = mean(both)
    half = float(stats.t.ppf(0.975, len(both) - 1)) * stdev(both) / len(both) ** 0.5
    return Interval(middle, middle - half, middle + half, len(both))


def lns(losses: Losses) -> tuple[str, str]:
    """Return word and numbers of the claim."""
    found = gap(losses, "lns", "pre")
    return _sided(-1, found), f"`lns` − `pre` {found}"


def hybrid(losses: Losses) -> tuple[str, str]:
    """Return word and numbers of the claim."""
    best = min(("pre", "post"), key=lambda arm: mean(losses[arm].values()))
    found = gap(losses, "hybrid", best)
    word = "shown" if found.high <= MARGIN else "contradicted" if found.low > MARGIN else "open"
    return word, f"`hybrid` − `{best}` {found}"


def decay(losses: Losses) -> tuple[str, str]:
    """Return word and numbers of the claim."""
    parts = [gap(losses, arm, "peri") for arm in ("peri-input", "peri-output")]
    words = [_sided(-1, parts[0]), _sided(1, parts[1])]
    word = "contradicted" if "contradicted" in words else "open" if "open" in words else "shown"
    return word, f"input {parts[0]}; output {parts[1]}"


def saturation(losses: Losses, shares: Losses) -> tuple[str, str]:
    """Return word and numbers of the claim; `shares` are by arm and seed, too."""
    points = [
        (seed, share, losses[arm][seed] - losses["pre"][seed])
        for arm, by_seed in shares.items()
        for seed, share in by_seed.items()
        if seed in losses[arm] and seed in losses["pre"]
    ]
    seeds = sorted({seed for seed, _, _ in points})
    draw = Random(0)
    samples = sorted(
        _spearman(
            point
            for seed in draw.choices(seeds, k=len(seeds))
            for point in points
            if point[0] == seed
        )
        for _ in range(2000)
    )
    found = Interval(_spearman(points), samples[50], samples[-51], len(points))
    return _sided(1, found), f"Spearman's ρ {found}"


def _spearman(points: Iterable[tuple[int, float, float]]) -> float:
    _, x, y = zip(*points, strict=True)
    return float(stats.spearmanr(x, y).statistic)


def _sided(sign: int, found: Interval) -> str:
    low, high = sorted((sign * found.low, sign * found.high))
    return "shown" if low > 0 else "contradicted" if high < 0 else "open"
