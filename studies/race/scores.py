"""Accuracy and cost of each rule, and threshold rules chosen with one text left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest

from rules import (
    CLEAR_GAP,
    FULL_SEEDS,
    GOAL,
    Choice,
    Rule,
    Setting,
    final,
    fixed_rules,
    heat_rules,
    truth,
)

BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
"""Largest mean costs of a threshold rule on the texts on which it is chosen."""


def scores_of(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the scores of the rules for results.json."""
    num_seeds = min(len(setting["seeds"]) for setting in settings)
    rows = [
        {"family": family, "rule": name, **_score(settings, [rule(one) for one in settings])}
        for family, name, rule in fixed_rules(num_seeds)
    ]
    rules = heat_rules(num_seeds)
    for budget in BUDGETS:
        choices = _left_out(settings, rules, budget)
        if choices is not None:
            name = f"chosen for a cost of {100 * budget:.0f} % at most"
            row = {"family": "threshold, a text left out", "rule": name}
            rows.append({**row, **_score(settings, choices)})
    clear = [setting["name"] for setting in settings if truth(setting)[1]]
    return {
        "full_seeds": FULL_SEEDS,
        "num_seeds": num_seeds,
        "num_settings": len(settings),
        "texts": sorted({setting["text"] for setting in settings}),
        "clear": clear,
        "best": {setting["name"]: truth(setting)[0] for setting in settings},
        "goal": GOAL,
        "rules": rows,
    }


def _score(settings: Sequence[Setting], choices: Sequence[Choice]) -> dict[str, Any]:
    cases = [
        (choice.norm == best, _is_as_good(setting, choice.norm, best), is_clear)
        for setting, choice in zip(settings, choices, strict=True)
        for best, is_clear in [truth(setting)]
    ]
    right = [is_right for is_right, _, is_clear in cases if is_clear]
    as_good = [good for _, good, _ in cases]
    return {
        "cost": float(np.mean([choice.cost for choice in choices])),
        "right_clear": sum(right),
        "num_clear": len(right),
        "interval_clear": _interval(right),
        "as_good": sum(as_good),
        "num": len(as_good),
        "interval": _interval(as_good),
    }


def _is_as_good(setting: Setting, norm: str, best: str) -> bool:
    return final(setting, norm, "test") <= final(setting, best, "test") + CLEAR_GAP


def _interval(hits: Sequence[bool]) -> list[float] | None:
    """Return the 95 % interval of a share (Wilson)."""
    if not hits:
        return None
    ends = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
    return [float(ends.low), float(ends.high)]


def _left_out(
    settings: Sequence[Setting], rules: Mapping[Any, Rule], budget: float
) -> list[Choice] | None:
    """Return the choices in each setting by the rule that was chosen on the other texts.

    That is the rule within the budget that is correct most often there, and of these the cheapest.
    """
    if len({setting["text"] for setting in settings}) < 2:
        return None
    known = {key: [(rule(one), truth(one)[0]) for one in settings] for key, rule in rules.items()}
    found = []
    for index, setting in enumerate(settings):
        others = [place for place, one in enumerate(settings) if one["text"] != setting["text"]]

        def quality(key: Any, others: Sequence[int] = tuple(others)) -> tuple[bool, int, float]:
            pairs = [known[key][place] for place in others]
            cost = float(np.mean([choice.cost for choice, _ in pairs]))
            good = sum(
                _is_as_good(settings[place], known[key][place][0].norm, known[key][place][1])
                for place in others
            )
            return cost <= budget, good, -cost

        found.append(known[max(known, key=quality)][index][0])
    return found
