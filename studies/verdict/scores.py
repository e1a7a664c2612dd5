"""How often early quantities have the sign of the final gap right.

    python studies/verdict/scores.py studies/verdict    # again, from the settings in verdict.json

The rule is always "above a threshold the norm ends worse than LayerNorm". The threshold is chosen
on one half of the settings, as the one with the most right signs, and scored on the other half; no
setting that is scored has a say in it.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest, mannwhitneyu, spearmanr

from powernorm.diagnosis import Limits

NORMS = ("bn", "rbn", "pn")
"""Those whose gap to LayerNorm is predicted."""
CLEAR_GAP = 0.01
"""Nats per token; what differs by less is as good."""
ALIKE = 1.25
"""Factor by which batches of about the same size differ at most."""
NUM_HALVINGS = 1000
PREDICTORS = {
    "bn": [
        *(f"ln_{part}_tid_{of}" for part in ("total", "mean", "var") for of in ("last", "avg")),
        *(f"bn_{part}_tid_{of}" for of in ("last", "avg") for part in ("mean", "var")),
    ],
    "rbn": ["ln_total_tid_last", "ln_total_tid_avg"],
    "pn": ["ln_pn_tid_last", "ln_pn_tid_avg"],
}
LIMITS = {
    "bn": ("ln_total_tid_last", Limits().bn),
    "rbn": ("ln_total_tid_last", Limits().rbn),
    "pn": ("ln_pn_tid_last", Limits().pn),
}
"""The norm's default limit of `powernorm.diagnose`, alone: `diagnose` names the first norm whose
limit is kept."""

Setting = dict[str, Any]
Chooser = Callable[[np.ndarray, np.ndarray], float]
"""Chooses a threshold from values and whether the norm ended worse, of the settings that may have
a say."""


def mean_gap(setting: Setting, norm: str) -> float:
    """Return the final gap, mean over seeds; NaN where nothing is known.

    Infinite where one side was lost in more seeds than the other: ∞ where that was the norm.
    """
    record = setting["gaps"].get(norm)
    if record is None:
        return np.nan
    lead = record["num_lost"] - record["num_base_lost"]
    if lead:
        return float(np.copysign(np.inf, lead))
    return float(np.mean(record["test"])) if record["test"] else np.nan


@cache
def halves(groups: tuple[str, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide settings evenly into those that choose and those that are scored, as indices.

    Each group is divided evenly; groups with an odd number give their odd one to the two sides in
    turn.
    """
    rng = random.Random(seed)
    choosing: list[int] = []
    scored: list[int] = []
    for group in sorted(set(groups)):
        members = [index for index, own in enumerate(groups) if own == group]
        rng.shuffle(members)
        middle = len(members) // 2
        if len(members) % 2 and len(choosing) < len(scored):
            middle += 1
        choosing += members[:middle]
        scored += members[middle:]
    return np.array(choosing, int), np.array(scored, int)


def choosing_half(settings: Sequence[Setting]) -> list[str]:
    """Return the names of the settings on which thresholds are chosen, the same for all norms."""
    choosing, _ = halves(tuple(setting["group"] for setting in settings), 0)
    return [settings[index]["name"] for index in choosing]


def best_threshold(values: np.ndarray, worse: np.ndarray) -> float:
    """Return the threshold with the most right signs, where larger values mean worse.

    Candidates lie half-way between neighboring values and beyond both ends. Of several best ones
    the middle one is taken (the lower of two middles).
    """
    ordered = np.unique(values)
    between = ordered[:-1] + np.diff(ordered) / 2
    limits = np.concatenate([[-np.inf], between, [np.inf]])
    hits = ((values > limits[:, None]) == worse).sum(1)
    best = limits[hits == hits.max()]
    return float(best[(len(best) - 1) // 2])


def majority(values: np.ndarray, worse: np.ndarray) -> float:
    """Return the threshold that says of all settings what most are."""
    del values
    return -np.inf if 2 * worse.sum() > len(worse) else np.inf


def always(limit: float) -> Chooser:
    """Return a threshold that nothing is asked about."""
    return lambda *_: limit


@dataclass(frozen=True)
class Cases:
    """The settings as one norm's scores see them, an array entry each."""

    gaps: np.ndarray
    groups: np.ndarray
    tokens: np.ndarray
    is_clear: np.ndarray
    is_choosing: np.ndarray

    def part(self, chosen: np.ndarray) -> "Cases":
        """Return some of them."""
        return Cases(*(array[chosen] for array in vars(self).values()))


def scores_of(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return `scores` and `advice` of verdict.json."""
    scores = [score for norm in NORMS for score in _scores_of_norm(norm, settings)]
    return {"scores": scores, "advice": _advice_scores(settings)}


def _scores_of_norm(norm: str, settings: Sequence[Setting]) -> list[dict[str, Any]]:
    choosing = choosing_half(settings)
    known = [setting for setting in settings if not np.isnan(mean_gap(setting, norm))]
    gaps = np.array([mean_gap(setting, norm) for setting in known])
    seeds = [np.sign(setting["gaps"][norm]["test"]) for setting in known]
    one_sign = np.array([abs(signs.sum()) == len(signs) for signs in seeds], bool)
    cases = Cases(
        gaps,
        np.array([setting["group"] for setting in known]),
        np.array([setting["tokens_per_batch"] for setting in known]),
        np.isinf(gaps) | ((abs(gaps) >= CLEAR_GAP) & one_sign),
        np.array([setting["name"] in choosing for setting in known], bool),
    )

    def early(key: str) -> np.ndarray:
        return np.array([setting["early"][key] for setting in known], float)  # None is NaN

    gap, batch_gap = early(f"{norm}_gap"), early(f"{norm}_batch_gap")
    nothing = np.zeros(len(known))
    says_worse = 2 * (gaps > 0).sum() >= len(gaps)
    quantity, limit = LIMITS[norm]
    chosen: dict[str, tuple[np.ndarray, Chooser]] = {
        **{key: (early(key), best_threshold) for key in PREDICTORS[norm]},
        "early_gap": (gap, best_threshold),
        "early_gap_batch": (batch_gap, best_threshold),
        # A small batch is the bad sign.
        "tokens_per_batch": (-cases.tokens, best_threshold),
        "early_gap > 0": (gap, always(0)),
        "early_gap_batch > 0": (batch_gap, always(0)),
        "majority": (nothing, majority),
        "always worse" if says_worse else "always better": (
            nothing,
            always(-np.inf if says_worse else np.inf),
        ),
        "verdict": (early(quantity), always(limit)),
    }
    found = []
    for predictor, (values, choose) in chosen.items():
        there = ~np.isnan(values)
        part = cases.part(there)
        # Without a setting in either half there is nothing to score.
        if 0 < part.is_choosing.sum() < len(part.is_choosing):
            score = {"norm": norm, "predictor": predictor}
            found.append({**score, **_score(values[there], part, choose, predictor)})
    return found


def _score(values: np.ndarray, cases: Cases, choose: Chooser, predictor: str) -> dict[str, Any]:
    worse = cases.gaps > 0
    in_half = cases.is_choosing

    def right(scored: np.ndarray, choosing: np.ndarray) -> np.ndarray:
        limit = choose(values[choosing], worse[choosing])
        found: np.ndarray = (values[scored] > limit) == worse[scored]
        return found

    def share(scored: np.ndarray, choosing: np.ndarray) -> float:
        return float(right(scored, choosing).mean())

    clear = cases.is_clear
    each = np.arange(len(values))
    alone = np.array([right(each == one, each != one)[0] for one in each])
    groups = [cases.groups == group for group in np.unique(cases.groups)]
    by_group = [right(group, ~group) for group in groups] if len(groups) > 1 else []
    divided = [halves(tuple(cases.groups), seed) for seed in range(NUM_HALVINGS)]
    halvings = [share(scored, choosing) for choosing, scored in divided]
    limit = choose(values[in_half], worse[in_half])
    # JSON has no infinity: where all settings are said to be alike there is no threshold.
    is_chosen = choose is best_threshold and np.isfinite(limit)
    sign = -1 if predictor == "tokens_per_batch" else 1
    hits = right(~in_half, in_half)
    wilson = binomtest(int(hits.sum()), len(hits)).proportion_ci(method="wilson")
    return {
        "num_settings": len(values),
        "num_positive": int(worse.sum()),
        "threshold": sign * limit if is_chosen else None,
        "hits_choosing": share(in_half, in_half),
        "hits_scored": float(hits.mean()),
        "num_scored": len(hits),
        "interval": [wilson.low, wilson.high],
        "splits_mean": float(np.mean(halvings)),
        "splits_interval": np.quantile(halvings, [0.025, 0.975], method="nearest").tolist(),
        "leave_one_out": float(alone.mean()),
        "leave_one_out_clear": float(alone[clear].mean()) if clear.any() else None,
        "leave_one_group_out": float(np.concatenate(by_group).mean()) if by_group else None,
        "num_clear": int(clear.sum()),
        **_ranking(values, cases, is_ranked=predictor.startswith(("ln", "bn", "early", "tokens"))),
    }


def _ranking(values: np.ndarray, cases: Cases, *, is_ranked: bool) -> dict[str, Any]:
    """Return how well the values order the settings; nothing for what is no quantity.

    `auc`: the chance that a setting in which the norm ended worse has the larger value than one in
    which it did not; `auc_alike`: the same among pairs with about as many tokens in a batch, which
    is what the quantity knows beyond the size of the batch.
    """
    worse = cases.gaps > 0
    found = dict.fromkeys(("auc", "auc_alike", "num_alike", "rank_correlation"))
    found["num_alike"] = 0
    if not is_ranked:
        return found
    if 0 < worse.sum() < len(worse):
        wins = mannwhitneyu(values[worse], values[~worse]).statistic
        found["auc"] = float(wins / (worse.sum() * (~worse).sum()))
    sizes = np.log(cases.tokens)
    alike = abs(sizes[worse][:, None] - sizes[~worse]) <= np.log(ALIKE)
    if alike.any():
        differences = values[worse][:, None] - values[~worse]
        found["auc_alike"] = float((np.sign(differences[alike]) + 1).mean() / 2)
        found["num_alike"] = int(alike.sum())
    if len(values) > 2 and np.ptp(values) > 0 and len(np.unique(cases.gaps)) > 1:
        found["rank_correlation"] = float(spearmanr(values, cases.gaps).statistic)
    return found


def _advice_scores(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Count how often the advised norm did well, and how often each norm would have by itself."""
    rows = []
    for setting in settings:
        gaps = {"ln": 0.0, **{norm: mean_gap(setting, norm) for norm in NORMS}}
        if setting["advice"] is not None and not np.isnan(list(gaps.values())).any():
            # Swapping the lowest layers only is none of what was trained: LayerNorm is kept.
            rows.append((gaps, setting["advice"] if setting["advice"] in gaps else "ln"))
    return [
        {
            "rule": rule,
            "num_settings": len(rows),
            "num_no_worse": sum(
                gaps[advice if rule == "advice" else rule] <= CLEAR_GAP for gaps, advice in rows
            ),
            "num_best": sum(
                gaps[advice if rule == "advice" else rule] <= min(gaps.values()) + CLEAR_GAP
                for gaps, advice in rows
            ),
        }
        for rule in ("advice", "ln", *NORMS)
        if rows
    ]


def main() -> None:
    """Score the settings of a folder's `verdict.json` again, and write its tables and figure."""
    from tables import write_tables

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds verdict.json")
    parser.add_argument("--out", type=Path, help="where to write; else the same folder")
    given = parser.parse_args()
    results = json.loads((given.folder / "verdict.json").read_text(encoding="utf-8"))
    out = given.out or given.folder
    out.mkdir(parents=True, exist_ok=True)
    results |= {"choosing": choosing_half(results["settings"]), **scores_of(results["settings"])}
    (out / "verdict.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_tables(results, out)


if __name__ == "__main__":
    main()
