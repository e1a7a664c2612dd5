"""Rules that stop training early, replayed on curves to get their choices and costs.

A setting has, for each norm and seed, the valid losses after each tenth of the training, then the
valid and test losses of the result. The full comparison trains every norm with FULL_SEEDS seeds;
costs are fractions of its updates. Rules see valid losses only. The correct choice is the norm with
the best mean test loss over all available seeds. Choosing a norm that leads early and ends behind
is an error like any other.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import powernorm_lab as lab

FULL_SEEDS = 5
CLEAR_GAP = 0.01
"""Smallest difference that counts, in nats per token, as in the study of the verdict."""
CONFIDENCES = (0.5, 0.8, 0.9, 0.95)
THRESHOLDS = (0.0, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Nats by which a norm may be behind at a validation before it is dropped."""
FIRST_LOOKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Fractions of the training before which nothing is dropped."""
GOAL = 0.9
"""Target fraction of clear cases in which a rule is correct."""

Setting = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """Choice of a rule in a setting, and its cost."""

    norm: str
    cost: float


Rule = Callable[[Setting], Choice]


def final(setting: Setting, norm: str, split: str, num_seeds: int | None = None) -> float:
    """Return the mean loss of a norm; infinite if a run was lost."""
    values = [run[split] for run in setting["runs"][norm][:num_seeds]]
    return math.inf if None in values else float(np.mean(values))


def truth(setting: Setting) -> tuple[str, bool]:
    """Return the norm with the best mean test loss, and whether its lead is clear.

    A clear lead over the second best is at least CLEAR_GAP on average, and present in all seeds
    except at most one.
    """
    first, second = sorted(setting["runs"], key=lambda norm: final(setting, norm, "test"))[:2]
    gaps = [
        math.inf if theirs["test"] is None else theirs["test"] - ours["test"]
        for ours, theirs in zip(setting["runs"][first], setting["runs"][second], strict=True)
    ]
    is_clear = float(np.mean(gaps)) >= CLEAR_GAP and sum(gap <= 0 for gap in gaps) <= 1
    return first, is_clear


def whole(num_seeds: int) -> Rule:
    """Return the rule that trains every norm to the end and takes the best on the valid split."""

    def choose(setting: Setting) -> Choice:
        norms = list(setting["runs"])
        best = min(norms, key=lambda norm: final(setting, norm, "valid", num_seeds))
        return Choice(best, num_seeds / FULL_SEEDS)

    return choose


def race(confidence: float) -> Rule:
    """Return the rule of `compare --race`, which goes seed by seed up to all available seeds."""

    def choose(setting: Setting) -> Choice:
        values = {norm: [run["valid"] for run in runs] for norm, runs in setting["runs"].items()}
        found = lab.replay_race(values, lab.Race(confidence))
        rounds = {drop["label"]: drop["after"] for drop in found["dropped"]}
        used = sum(rounds.get(norm, found["rounds"]) for norm in values)
        return Choice(found["leader"] or "", used / (FULL_SEEDS * len(values)))

    return choose


def heats(num_seeds: int, threshold: float, first_look: float) -> Rule:
    """Return the rule that trains all norms in parallel and drops those behind at a validation.

    A norm is behind if its mean over the seeds is worse than the best by more than the threshold.
    """

    def choose(setting: Setting) -> Choice:
        left, cost = list(setting["runs"]), 0.0
        looks = len(setting["runs"][left[0]][0]["curve"])
        for look in range(looks):
            cost += len(left) / looks
            if (look + 1) / looks < first_look - 1e-9 or look + 1 == looks:
                continue
            means = {norm: _at(setting, norm, look, num_seeds) for norm in left}
            best = min(means.values())
            left = [norm for norm in left if means[norm] <= best + threshold]
            if len(left) == 1:
                break
        best_left = min(left, key=lambda norm: final(setting, norm, "valid", num_seeds))
        share = num_seeds / FULL_SEEDS / len(setting["runs"])
        return Choice(best_left, cost * share)

    return choose


def halving(num_seeds: int, looks: Sequence[float]) -> Rule:
    """Return the rule of successive halving, which keeps the better half at each of `looks`."""

    def choose(setting: Setting) -> Choice:
        left, cost, before = list(setting["runs"]), 0.0, 0.0
        total = len(setting["runs"][left[0]][0]["curve"])
        for share in looks:
            cost += len(left) * (share - before)
            before = share
            look = round(share * total) - 1
            ranked = sorted(left, key=lambda norm: _at(setting, norm, look, num_seeds))
            left = ranked[: max(1, len(left) // 2)]
        return Choice(left[0], cost * num_seeds / FULL_SEEDS / len(setting["runs"]))

    return choose


def _at(setting: Setting, norm: str, look: int, num_seeds: int) -> float:
    """Return the mean valid loss at a validation; infinite if a run was lost before."""
    curves = [run["curve"] for run in setting["runs"][norm][:num_seeds]]
    values = [curve[look] if look < len(curve) else None for curve in curves]
    return math.inf if None in values else float(np.mean(values))


def fixed_rules(num_seeds: int) -> Iterator[tuple[str, str, Rule]]:
    """Yield family, name and rule of the rules without parameters to choose.

    Args:
        num_seeds: number of seeds of the settings.
    """
    for count in range(1, num_seeds + 1):
        yield "every run, fewer seeds", f"{count} seeds", whole(count)
    if num_seeds >= 3:
        for confidence in CONFIDENCES:
            yield "compare --race", f"confidence {100 * confidence:.0f} %", race(confidence)
    for count in range(1, num_seeds + 1):
        for looks in ((0.1, 0.2), (0.2, 0.4), (0.3, 0.6), (0.5, 0.8), (0.5, 1.0)):
            at = " and ".join(f"{100 * look:.0f} %" for look in looks)
            yield "successive halving", f"{count} seeds, after {at}", halving(count, looks)


def heat_rules(num_seeds: int) -> dict[tuple[int, float, float], Rule]:
    """Return the threshold rules by their parameters, from which one is chosen."""
    return {
        (count, threshold, first): heats(count, threshold, first)
        for count in range(1, num_seeds + 1)
        for threshold in THRESHOLDS
        for first in FIRST_LOOKS
    }
