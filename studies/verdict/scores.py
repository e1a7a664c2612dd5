"""Frequency with which early quantities predict the sign of the final gap.

The rule is always "above a threshold the norm ends worse than LayerNorm". The threshold is chosen
on one half of the settings, as the one with the most correct signs, and scored on the other half.
Scored settings do not affect it.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from scipy.stats import binomtest, mannwhitneyu, spearmanr

from powernorm.diagnosis import Limits

NORMS = ("bn", "rbn", "pn")
"""Norms whose gap to LayerNorm is predicted."""
CLEAR_GAP = 0.01
"""Smallest difference that counts, in nats per token."""
ALIKE = 1.25
"""Largest ratio of batch sizes that count as similar."""
NUM_HALVINGS = 1000

TIDS = {
    "ln_total_tid_last": "LayerNorm model: mean + var TID, last norm",
    "ln_total_tid_avg": "LayerNorm model: mean + var TID, average",
    "ln_mean_tid_last": "LayerNorm model: mean TID, last norm",
    "ln_mean_tid_avg": "LayerNorm model: mean TID, average",
    "ln_var_tid_last": "LayerNorm model: var TID, last norm",
    "ln_var_tid_avg": "LayerNorm model: var TID, average",
    "bn_mean_tid_last": "BatchNorm model: mean TID, last norm",
    "bn_var_tid_last": "BatchNorm model: var TID, last norm",
    "bn_mean_tid_avg": "BatchNorm model: mean TID, average",
    "bn_var_tid_avg": "BatchNorm model: var TID, average",
    "ln_pn_tid_last": "LayerNorm model: PowerNorm's TID, last norm",
    "ln_pn_tid_avg": "LayerNorm model: PowerNorm's TID, average",
}
"""TID as fractions: of a BatchNorm (or PowerNorm with GroupScaling) in the early LayerNorm model,
and of BatchNorm in the early BatchNorm model."""
PREDICTORS = {"bn": [*TIDS][:10], "rbn": [*TIDS][:2], "pn": [*TIDS][10:]}

Setting = dict[str, Any]
Chooser = Callable[[np.ndarray, np.ndarray], float]
"""Function that chooses a threshold from the settings' values and whether the norm ended worse."""


def mean_gap(setting: Setting, norm: str) -> float:
    """Return the final gap, mean over seeds; NaN if it is unknown.

    If one side was lost in more seeds than the other, it is infinite: ∞ for the norm.
    """
    record = setting["gaps"].get(norm)
    if record is None:
        return np.nan
    lead = record["num_lost"] - record["num_base_lost"]
    if lead:
        return float(np.copysign(np.inf, lead))
    return float(np.mean(record["test"])) if record["test"] else np.nan


@cache
def halves(groups: tuple[str, ...], seed: int) -> tuple[list[int], list[int]]:
    """Divide the indices of settings into a half for choosing and a half for scoring.

    Each group is divided evenly; groups with an odd number favor the two sides in turn.
    """
    rng = random.Random(seed)
    choosing: list[int] = []
    scored: list[int] = []
    for group in sorted(set(groups)):
        members = [index for index, own in enumerate(groups) if own == group]
        rng.shuffle(members)
        middle = (len(members) + (len(choosing) < len(scored))) // 2
        choosing += members[:middle]
        scored += members[middle:]
    return choosing, scored


def choosing_half(settings: Sequence[Setting]) -> list[str]:
    """Return the names of the settings on which thresholds are chosen, the same for all norms."""
    choosing, _ = halves(tuple(setting["group"] for setting in settings), 0)
    return [settings[index]["name"] for index in choosing]


def best_threshold(values: np.ndarray, worse: np.ndarray) -> float:
    """Return the threshold with the most correct signs, if larger values mean worse.

    Candidates are half-way between neighboring values and beyond both ends. Of several best ones
    the middle one is chosen (the lower of two middles).
    """
    ordered = np.unique(values)
    limits = np.concatenate([[-np.inf], ordered[:-1] + np.diff(ordered) / 2, [np.inf]])
    hits = ((values > limits[:, None]) == worse).sum(1)
    best = limits[hits == hits.max()]
    return float(best[(len(best) - 1) // 2])


def majority(_: np.ndarray, worse: np.ndarray) -> float:
    """Return the threshold that assigns the majority's outcome to all settings."""
    return -np.inf if 2 * worse.sum() > len(worse) else np.inf


def always(limit: float) -> Chooser:
    """Return a chooser with a fixed threshold."""
    return lambda *_: limit


def scores_of(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return `choosing`, `scores` and `advice` of verdict.json."""
    scores = [score for norm in NORMS for score in _scores_of_norm(norm, settings)]
    choosing = choosing_half(settings)
    return {"choosing": choosing, "scores": scores, "advice": _advice_scores(settings)}


def _scores_of_norm(norm: str, settings: Sequence[Setting]) -> list[dict[str, Any]]:
    known = [setting for setting in settings if not np.isnan(mean_gap(setting, norm))]
    choosing = choosing_half(settings)

    def early(key: str) -> np.ndarray:
        return np.array([setting["early"][key] for setting in known], float)  # None is NaN

    def constant(value: float) -> np.ndarray:
        return np.full(len(known), float(value))

    says_worse = 2 * sum(mean_gap(setting, norm) > 0 for setting in known) >= len(known)
    # The norm's own limit, because `diagnose` names only the first norm that is within its limit.
    quantity = "ln_pn_tid_last" if norm == "pn" else "ln_total_tid_last"
    rules: dict[str, tuple[np.ndarray, Chooser]] = {
        **{key: (early(key), best_threshold) for key in PREDICTORS[norm]},
        "early_gap": (early(f"{norm}_gap"), best_threshold),
        "early_gap_batch": (early(f"{norm}_batch_gap"), best_threshold),
        # Negative, because small batches predict a worse norm.
        "tokens_per_batch": (-np.array([s["tokens_per_batch"] for s in known]), best_threshold),
        "early_gap > 0": (early(f"{norm}_gap"), always(0)),
        "early_gap_batch > 0": (early(f"{norm}_batch_gap"), always(0)),
        "majority": (constant(0), majority),
        f"always {'worse' if says_worse else 'better'}": (constant(says_worse), always(0.5)),
        "verdict": (early(quantity), always(getattr(Limits(), norm))),
    }
    found = []
    for predictor, (values, choose) in rules.items():
        there = [known[index] for index in np.flatnonzero(~np.isnan(values))]
        is_choosing = np.array([setting["name"] in choosing for setting in there], bool)
        # Both halves need a setting.
        if 0 < is_choosing.sum() < len(there):
            score = _score(norm, there, values[~np.isnan(values)], choose, is_choosing)
            if predictor in ("majority", "always worse", "always better", "verdict"):
                score |= {"auc": None, "auc_alike": None, "num_alike": 0, "rank_correlation": None}
            if predictor == "tokens_per_batch" and score["threshold"] is not None:
                score["threshold"] *= -1
            found.append({"norm": norm, "predictor": predictor, **score})
    return found


def _score(
    norm: str,
    settings: Sequence[Setting],
    values: np.ndarray,
    choose: Chooser,
    is_choosing: np.ndarray,
) -> dict[str, Any]:
    gaps = np.array([mean_gap(setting, norm) for setting in settings])
    groups = np.array([setting["group"] for setting in settings])
    worse = gaps > 0
    signs = [np.sign(setting["gaps"][norm]["test"]) for setting in settings]
    one_sign = np.array([abs(own.sum()) == len(own) for own in signs])
    clear = np.isinf(gaps) | ((abs(gaps) >= CLEAR_GAP) & one_sign)

    def right(scored: Any, choosing: Any) -> np.ndarray:
        limit = choose(values[choosing], worse[choosing])
        return np.array((values[scored] > limit) == worse[scored])

    hits = right(~is_choosing, is_choosing)
    halvings = [
        right(scored, choosing).mean()
        for choosing, scored in (halves(tuple(groups), seed) for seed in range(NUM_HALVINGS))
    ]
    each = np.arange(len(values))
    alone = np.array([right(each == one, each != one)[0] for one in each])
    texts = [groups == group for group in np.unique(groups)]
    other_texts = [right(text, ~text) for text in texts] if len(texts) > 1 else []
    limit = choose(values[is_choosing], worse[is_choosing])
    return {
        "num_settings": len(values),
        "num_positive": int(worse.sum()),
        # JSON has no infinity, the threshold of a rule that predicts the same for all settings.
        "threshold": limit if choose is best_threshold and np.isfinite(limit) else None,
        "hits_choosing": float(right(is_choosing, is_choosing).mean()),
        "hits_scored": float(hits.mean()),
        "num_scored": len(hits),
        "interval": list(binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")),
        "splits_mean": float(np.mean(halvings)),
        "splits_interval": np.quantile(halvings, [0.025, 0.975], method="nearest").tolist(),
        "leave_one_out": float(alone.mean()),
        "leave_one_out_clear": float(alone[clear].mean()) if clear.any() else None,
        "leave_one_group_out": float(np.concatenate(other_texts).mean()) if other_texts else None,
        "num_clear": int(clear.sum()),
        **_ranking(values, gaps, np.array([setting["tokens_per_batch"] for setting in settings])),
    }


def _ranking(values: np.ndarray, gaps: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """Return how well the values rank the settings.

    `auc` is the probability that a setting in which the norm ended worse has a larger value than
    one in which it did not. `auc_alike` is the same for pairs with similar numbers of tokens in a
    batch, so that it measures information beyond the size of the batch.
    """
    worse = gaps > 0
    pairs = np.sign(values[worse][:, None] - values[~worse])
    alike = abs(np.log(tokens[worse][:, None] / tokens[~worse])) <= np.log(ALIKE)
    is_ordered = len(values) > 2 and len(np.unique(values)) > 1 and len(np.unique(gaps)) > 1
    wins = mannwhitneyu(values[worse], values[~worse]).statistic if pairs.size else None
    return {
        "auc": None if wins is None else float(wins / pairs.size),
        "auc_alike": float((pairs[alike] + 1).mean() / 2) if alike.any() else None,
        "num_alike": int(alike.sum()),
        "rank_correlation": float(spearmanr(values, gaps).statistic) if is_ordered else None,
    }


def _advice_scores(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Count how often the advised norm did well, and how often each norm alone would have."""
    rows = []
    for setting in settings:
        gaps = {"ln": 0.0, **{norm: mean_gap(setting, norm) for norm in NORMS}}
        if setting["advice"] is not None and not np.isnan(list(gaps.values())).any():
            # A swap of the lowest layers was not trained, so that it counts as keeping LayerNorm.
            advised = setting["advice"] if setting["advice"] in gaps else "ln"
            rows.append(({**gaps, "advice": gaps[advised]}, min(gaps.values())))
    return [
        {
            "rule": rule,
            "num_settings": len(rows),
            "num_no_worse": sum(gaps[rule] <= CLEAR_GAP for gaps, _ in rows),
            "num_best": sum(gaps[rule] <= best + CLEAR_GAP for gaps, best in rows),
        }
        for rule in ("advice", "ln", *NORMS)
        if rows
    ]
