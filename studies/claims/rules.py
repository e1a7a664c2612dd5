"""The six claims and the rule of each, written before anything was trained.

Losses are in nats per token of the test text, of the seeds after the tuning, paired by seed. An
interval is the two-sided 95 % interval of Student's t. `MARGIN` is what counts as no difference:
three percent of perplexity. A run is lost when its loss was not finite or it ended above the
unigram distribution (`diverged`); a norm that lost a seed is behind every one that lost none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import stdev
from typing import Any

from scipy import stats

MARGIN = 0.03

Losses = Mapping[str, list[float | None]]
"""Losses by arm, in the order of the seeds; None is a lost run."""
Results = Mapping[str, Losses]
"""Losses by group."""


@dataclass(frozen=True)
class Verdict:
    """Verdict (shown, contradicted or open) with its numbers."""

    word: str
    found: str


@dataclass(frozen=True)
class Claim:
    """Claim of a paper as tested here."""

    name: str
    claim: str
    source: str
    rule: str
    groups: tuple[str, ...]
    judge: Callable[[Results], Verdict]


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return mean and both ends of the 95 % interval."""
    mean = sum(values) / len(values)
    error = stdev(values, mean) / len(values) ** 0.5
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return mean, mean - half, mean + half


def gap(losses: Losses, arm: str, other: str) -> tuple[float, float, float]:
    """Return mean and interval of `arm` minus `other`; infinite if only one lost runs."""
    num_lost = {name: sum(one is None for one in losses[name]) for name in (arm, other)}
    if num_lost[arm] != num_lost[other]:
        far = inf if num_lost[arm] > num_lost[other] else -inf
        return far, far, far
    pairs = zip(losses[arm], losses[other], strict=True)
    both = [one - two for one, two in pairs if one is not None and two is not None]
    # If both lose runs and hardly any pair is left, the interval is infinite.
    return interval(both) if len(both) > 1 else (0.0, -inf, inf)


def shown_gap(losses: Losses, arm: str, other: str) -> str:
    """Return a gap in words."""
    mean, low, high = gap(losses, arm, other)
    if abs(mean) == inf:
        return f"`{arm}` {'alone' if mean > 0 else 'never, `' + other + '` alone'} lost runs"
    return f"`{arm}` - `{other}` {mean:+.3f} ({low:+.3f} to {high:+.3f})"


def at_least_as_good(losses: Losses, arm: str, other: str) -> str:
    """Return the verdict on "`arm` is level with `other` or better"."""
    _, low, high = gap(losses, arm, other)
    return "shown" if high <= MARGIN else "contradicted" if low > MARGIN else "open"


def level(losses: Losses, arm: str, other: str) -> str:
    """Return the verdict on "`arm` and `other` do not differ"."""
    _, low, high = gap(losses, arm, other)
    if low >= -MARGIN and high <= MARGIN:
        return "shown"
    return "contradicted" if low > MARGIN or high < -MARGIN else "open"


def all_of(*words: str) -> str:
    """Combine the verdicts on several parts of a claim."""
    if "contradicted" in words:
        return "contradicted"
    return "shown" if set(words) == {"shown"} else "open"


def derf(results: Results) -> Verdict:
    """Judge: Derf is level with LayerNorm or better, and LayerNorm with DyT."""
    losses = results["adamw"]
    word = all_of(at_least_as_good(losses, "derf", "ln"), at_least_as_good(losses, "ln", "dyt"))
    return Verdict(word, f"{shown_gap(losses, 'derf', 'ln')}; {shown_gap(losses, 'ln', 'dyt')}")


def prepbn(results: Results) -> Verdict:
    """Judge: PRepBN, merged, is level with LayerNorm."""
    losses = results["adamw"]
    return Verdict(level(losses, "prepbn", "ln"), shown_gap(losses, "prepbn", "ln"))


def unified(results: Results) -> Verdict:
    """Judge: UN is level with LayerNorm or better where BatchNorm is behind."""
    losses = results["small-batches"]
    fails = gap(losses, "bn", "ln")[1] > MARGIN
    word = at_least_as_good(losses, "un", "ln") if fails else "open"
    return Verdict(word, f"{shown_gap(losses, 'bn', 'ln')}; {shown_gap(losses, 'un', 'ln')}")


def peri(results: Results) -> Verdict:
    """Judge: Peri-LN varies less over seeds, at the same rates, and is not lost more often."""
    losses = results["peri"]
    pre, other = (_pooled(losses, placement) for placement in ("pre", "peri"))
    if not (pre.freedom and other.freedom):
        return Verdict("open", "too few runs are left")
    ratio = other.variance / pre.variance
    low, high = (
        ratio / float(stats.f.ppf(share, other.freedom, pre.freedom)) for share in (0.975, 0.025)
    )
    if high < 1 and other.num_lost <= pre.num_lost:
        word = "shown"
    else:
        word = "contradicted" if low > 1 and other.num_lost >= pre.num_lost else "open"
    spread = f"standard deviation over seeds {other.variance**0.5:.4f} for {pre.variance**0.5:.4f}"
    return Verdict(
        word,
        f"{spread} of `pre` (ratio of the variances {ratio:.2f}, {low:.2f} to {high:.2f}); lost "
        f"{other.num_lost} of {other.num_runs} for {pre.num_lost} of {pre.num_runs}",
    )


@dataclass(frozen=True)
class _Pooled:
    """Runs of a placement, pooled over all rates."""

    variance: float
    freedom: int
    num_lost: int
    num_runs: int


def _pooled(losses: Losses, placement: str) -> _Pooled:
    squares, freedom, num_lost, num_runs = 0.0, 0, 0, 0
    for key, values in losses.items():
        if key.partition("@")[0] == placement:
            kept = [value for value in values if value is not None]
            num_lost, num_runs = num_lost + len(values) - len(kept), num_runs + len(values)
            if len(kept) > 1:
                mean = sum(kept) / len(kept)
                squares += sum((value - mean) ** 2 for value in kept)
                freedom += len(kept) - 1
    return _Pooled(squares / max(freedom, 1), freedom, num_lost, num_runs)


def muon(results: Results) -> Verdict:
    """Judge: Derf's lead over RMSNorm is larger under Muon than under AdamW."""
    leads = [
        [
            None if one is None or two is None else two - one
            for one, two in zip(results[group]["derf"], results[group]["rms"], strict=True)
        ]
        for group in ("muon", "adamw")
    ]
    both = [a - b for a, b in zip(*leads, strict=True) if a is not None and b is not None]
    parts = [f"{shown_gap(results[group], 'derf', 'rms')} ({group})" for group in ("adamw", "muon")]
    if len(both) < 2:
        return Verdict("open", "; ".join(parts))
    mean, low, high = interval(both)
    word = "shown" if low > 0 else "contradicted" if high < 0 else "open"
    return Verdict(word, f"{'; '.join(parts)}; growth {mean:+.3f} ({low:+.3f} to {high:+.3f})")


def bn_ffn(results: Results) -> Verdict:
    """Judge: BN inside the feed-forward loses fewer runs where a plain swap loses a fifth."""
    plain, inside = (_pooled(results["bn-ffn"], name) for name in ("pre", "bn-ffn"))
    found = (
        f"lost {inside.num_lost} of {inside.num_runs} with it, {plain.num_lost} of "
        f"{plain.num_runs} without"
    )
    if not plain.num_runs or plain.num_lost < plain.num_runs / 5:
        return Verdict("open", f"{found}: the plain swap did not diverge here")
    table: Any = [
        [plain.num_lost, plain.num_runs - plain.num_lost],
        [inside.num_lost, inside.num_runs - inside.num_lost],
    ]
    p = float(stats.fisher_exact(table, alternative="greater").pvalue)
    if p < 0.05:
        return Verdict("shown", f"{found} (Fisher's p {p:.2g})")
    word = "contradicted" if inside.num_lost >= plain.num_lost else "open"
    return Verdict(word, f"{found} (Fisher's p {p:.2g})")


CLAIMS = (
    Claim(
        "derf",
        "Derf ≥ LayerNorm ≥ DyT",
        "Chen et al. 2025",
        "each part: the interval of the difference does not reach above the margin (contradicted: "
        "it lies above it); the claim: both parts",
        ("adamw",),
        derf,
    ),
    Claim(
        "prepbn",
        "PRepBN ≈ LayerNorm after the merge",
        "Guo et al. 2024",
        "the interval lies within the margin on both sides (contradicted: outside)",
        ("adamw",),
        prepbn,
    ),
    Claim(
        "un",
        "UnifiedNorm ≈ LayerNorm where BatchNorm fails",
        "Yang et al. 2022",
        "where BatchNorm is behind by more than the margin, UN's interval does not reach above the "
        "margin (contradicted: it lies above it); open where BatchNorm does not fail",
        ("small-batches",),
        unified,
    ),
    Claim(
        "peri",
        "Peri-LN is steadier than pre-norm",
        "Kim et al. 2025",
        "over the same rates the variance between seeds is smaller, its ratio's 95 % interval "
        "(Fisher's F, within rates) below 1, and no more runs are lost (contradicted: above 1, and "
        "no fewer lost)",
        ("peri",),
        peri,
    ),
    Claim(
        "muon",
        "Derf's lead over RMSNorm grows from AdamW to Muon",
        "reported of Derf since",
        "the interval of the difference of the two leads, paired by seed, lies above 0 "
        "(contradicted: below)",
        ("adamw", "muon"),
        muon,
    ),
    Claim(
        "bn-ffn",
        "BatchNorm in the feed-forward cures the divergence of a plain swap",
        "Yao et al. 2021",
        "where the plain swap loses a fifth of its runs or more, fewer are lost with it (Fisher's "
        "exact test, 5 %; contradicted: as many or more); open where the plain swap does not "
        "diverge",
        ("bn-ffn",),
        bn_ffn,
    ),
)
