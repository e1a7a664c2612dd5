"""How often early quantities have the sign of the final gap right.

The rule is always "above a threshold the norm ends worse than LayerNorm". The threshold is chosen
on one half of the settings, as the one with the most right signs, and scored on the other half; no
setting that is scored has a say in it. Plain Python over numbers, so that it can be checked by
hand.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final, Protocol, TypeVar

from powernorm.verdict_runs import AdviceScore, PredictorScore

NUM_SPLITS: Final = 1000
SIZE: Final = "tokens_per_batch"
ALIKE: Final = 1.25
"""Factor by which batches of about the same size differ at most."""
DESCENDING: Final = (SIZE,)
"""Predictors of which a small value is a bad sign."""
SIGNED: Final = ("early_gap", "early_gap_batch")
"""Predictors whose sign is a rule by itself."""
BASE: Final = "ln"


class Grouped(Protocol):
    """What can be divided evenly by groups."""

    @property
    def group(self) -> str:
        """Return the name of its group."""
        ...


_Grouped = TypeVar("_Grouped", bound=Grouped)


@dataclass(frozen=True, slots=True)
class Case:
    """One setting as the scores see it."""

    name: str
    group: str
    gap: float
    """Final loss of the norm minus LayerNorm's; ∞ where the norm was lost, −∞ where LayerNorm."""
    is_clear: bool
    values: Mapping[str, float]
    """By predictor; those that are missing leave the setting out of its score."""
    verdict: bool | None = None
    """What the norm's default limit says: True for worse."""

    def sign_of_worse(self, predictor: str) -> float:
        """Return the value, turned so that a larger one is a worse sign."""
        value = self.values[predictor]
        return -value if predictor in DESCENDING else value

    @property
    def is_worse(self) -> bool:
        """Whether the norm ended worse than LayerNorm."""
        return self.gap > 0


Rule = Callable[[Case], bool]
Chooser = Callable[[Sequence[Case]], Rule]
"""Makes a rule from the settings that it may look at."""


def half_split(cases: Sequence[_Grouped], seed: int) -> tuple[list[_Grouped], list[_Grouped]]:
    """Divide the settings evenly into those that choose and those that are scored.

    Each group is divided evenly; groups with an odd number give their odd one to the two sides in
    turn.
    """
    rng = random.Random(seed)
    choosing: list[_Grouped] = []
    scored: list[_Grouped] = []
    for group in sorted({case.group for case in cases}):
        members = [case for case in cases if case.group == group]
        rng.shuffle(members)
        middle = len(members) // 2
        if len(members) % 2 and len(choosing) < len(scored):
            middle += 1
        choosing += members[:middle]
        scored += members[middle:]
    return choosing, scored


def best_threshold(values: Sequence[float], is_worse: Sequence[bool]) -> float:
    """Return the threshold with the most right signs, where larger values mean worse.

    Candidates lie half-way between neighbouring values and beyond both ends. Of several best ones
    the middle one is taken (the lower of two middles).

    >>> best_threshold([1.0, 2.0, 3.0, 4.0], [False, False, True, True])
    2.5
    """
    ordered = sorted(set(values))
    candidates = [
        -math.inf,
        *(low + (high - low) / 2 for low, high in pairwise(ordered)),
        math.inf,
    ]
    pairs = list(zip(values, is_worse, strict=True))
    hits = [sum((value > limit) == worse for value, worse in pairs) for limit in candidates]
    best = [limit for limit, count in zip(candidates, hits, strict=True) if count == max(hits)]
    return best[(len(best) - 1) // 2]


def auc(values: Sequence[float], is_worse: Sequence[bool]) -> float | None:
    """Return the chance that a worse setting has the larger value; ties count half.

    None where all settings are of one kind.
    """
    pairs = list(zip(values, is_worse, strict=True))
    worse = [value for value, bad in pairs if bad]
    better = [value for value, bad in pairs if not bad]
    if not worse or not better:
        return None
    return fmean(_win(high, low) for high in worse for low in better)


def alike_pairs(cases: Sequence[Case]) -> list[tuple[Case, Case]]:
    """Return the pairs (worse, better) whose batches differ in size by `ALIKE` at most."""
    sized = [case for case in cases if SIZE in case.values]
    return [
        (worse, better)
        for worse in sized
        for better in sized
        if worse.is_worse
        and not better.is_worse
        and abs(math.log(worse.values[SIZE] / better.values[SIZE])) <= math.log(ALIKE)
    ]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's correlation; None where one side is constant or there are fewer than 3."""
    if len(first) < 3:
        return None
    a, b = _ranks(first), _ranks(second)
    mean = fmean(a)
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    scale = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return covariance / scale if scale else None


def wilson_interval(hits: float, number: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    if not number:
        return 0.0, 1.0
    z = 1.959963984540054
    center = (hits + z * z / (2 * number)) / (1 + z * z / number)
    half = z * math.sqrt(hits * (1 - hits) / number + (z / (2 * number)) ** 2)
    half /= 1 + z * z / number
    return max(0.0, center - half), min(1.0, center + half)


def scores_of(
    norm: str, cases: Sequence[Case], predictors: Sequence[str], choosing: Collection[str]
) -> list[PredictorScore]:
    """Score all predictors for one norm.

    Args:
        norm: whose gap it is.
        cases: those without a predictor's value are left out of its score.
        predictors: keys of `Case.values`.
        choosing: names of the settings on which thresholds are chosen, the same for all norms; a
            predictor without a setting in it, or in the rest, has no score.
    """
    scores = []
    for predictor in predictors:
        known = _with(cases, predictor)
        scores.append(
            _score(norm, predictor, known, _threshold_chooser(predictor), choosing, predictor)
        )
    for predictor in SIGNED:
        if predictor in predictors:
            known = _with(cases, predictor)
            rule = _fixed(_above_zero(predictor))
            scores.append(_score(norm, f"{predictor} > 0", known, rule, choosing, predictor))
    scores.append(_score(norm, "majority", cases, _majority, choosing))
    says = 2 * sum(case.is_worse for case in cases) >= len(cases)
    name = "always worse" if says else "always better"
    scores.append(_score(norm, name, cases, _fixed(lambda _: says), choosing))
    judged = [case for case in cases if case.verdict is not None]
    rule = _fixed(lambda case: bool(case.verdict))
    scores.append(_score(norm, "verdict", judged, rule, choosing))
    return [score for score in scores if score is not None]


def advice_scores(
    gaps: Sequence[Mapping[str, float]], advice: Sequence[str], clear_gap: float
) -> list[AdviceScore]:
    """Say how often the advised norm did well, and how often each norm would have by itself.

    Args:
        gaps: in each setting, the gaps to LayerNorm of the norms beside it.
        advice: the norm that was advised in each, `BASE` for LayerNorm.
        clear_gap: what is as good as equal.
    """
    if not gaps:
        return []
    settings = [{BASE: 0.0, **found} for found in gaps]
    rules = {"advice": advice, **{norm: [norm] * len(settings) for norm in settings[0]}}
    return [
        AdviceScore(
            rule=rule,
            num_settings=len(settings),
            num_no_worse=sum(
                found[norm] <= clear_gap for found, norm in zip(settings, chosen, strict=True)
            ),
            num_best=sum(
                found[norm] <= min(found.values()) + clear_gap
                for found, norm in zip(settings, chosen, strict=True)
            ),
        )
        for rule, chosen in rules.items()
    ]


def _score(
    norm: str,
    name: str,
    cases: Sequence[Case],
    choose: Chooser,
    choosing_names: Collection[str],
    quantity: str | None = None,
) -> PredictorScore | None:
    choosing = [case for case in cases if case.name in choosing_names]
    scored = [case for case in cases if case.name not in choosing_names]
    if not choosing or not scored:
        return None
    rule = choose(choosing)
    splits = sorted(_scored_hits(choose, *half_split(cases, seed)) for seed in range(NUM_SPLITS))
    alone = _left_out(choose, cases, lambda case, other: other is case)
    clear = [right for case, right in zip(cases, alone, strict=True) if case.is_clear]
    has_groups = len({case.group for case in cases}) > 1
    values = [case.sign_of_worse(quantity) for case in cases] if quantity else []
    worse = [case.is_worse for case in cases]
    threshold = _chosen_threshold(choosing, name) if quantity == name else None
    hits = _hits(rule, scored)
    pairs = alike_pairs(cases) if quantity else []
    wins = (
        [_win(bad.sign_of_worse(quantity), good.sign_of_worse(quantity)) for bad, good in pairs]
        if quantity
        else []
    )
    return PredictorScore(
        norm=norm,
        predictor=name,
        num_settings=len(cases),
        num_positive=sum(worse),
        threshold=_shown(threshold, name),
        hits_choosing=_hits(rule, choosing),
        hits_scored=hits,
        num_scored=len(scored),
        interval=wilson_interval(hits, len(scored)),
        splits_mean=fmean(splits),
        splits_interval=(_quantile(splits, 0.025), _quantile(splits, 0.975)),
        leave_one_out=fmean(alone),
        leave_one_out_clear=fmean(clear) if clear else None,
        leave_one_group_out=fmean(
            _left_out(choose, cases, lambda case, other: other.group == case.group)
        )
        if has_groups
        else None,
        num_clear=len(clear),
        auc=auc(values, worse) if values else None,
        auc_alike=fmean(wins) if wins else None,
        num_alike=len(wins),
        rank_correlation=rank_correlation(values, [c.gap for c in cases]) if values else None,
    )


def _with(cases: Sequence[Case], predictor: str) -> list[Case]:
    return [case for case in cases if predictor in case.values]


def _left_out(
    choose: Chooser, cases: Sequence[Case], is_left_out: Callable[[Case, Case], bool]
) -> list[bool]:
    """Whether each setting is right by a rule that was chosen without some, itself among them."""
    return [
        choose([other for other in cases if not is_left_out(case, other)])(case) == case.is_worse
        for case in cases
    ]


def _win(high: float, low: float) -> float:
    return 0.5 if high == low else float(high > low)


def _threshold_chooser(predictor: str) -> Chooser:
    def choose(choosing: Sequence[Case]) -> Rule:
        limit = _chosen_threshold(choosing, predictor)
        return lambda case: case.sign_of_worse(predictor) > limit

    return choose


def _chosen_threshold(choosing: Sequence[Case], predictor: str) -> float:
    return best_threshold(
        [case.sign_of_worse(predictor) for case in choosing], [case.is_worse for case in choosing]
    )


def _shown(threshold: float | None, predictor: str) -> float | None:
    """JSON has no infinity: where all settings are said to be alike there is no threshold."""
    if threshold is None or not math.isfinite(threshold):
        return None
    return -threshold if predictor in DESCENDING else threshold


def _majority(choosing: Sequence[Case]) -> Rule:
    says = 2 * sum(case.is_worse for case in choosing) > len(choosing)
    return lambda _: says


def _fixed(rule: Rule) -> Chooser:
    return lambda _: rule


def _above_zero(predictor: str) -> Rule:
    return lambda case: case.values[predictor] > 0


def _scored_hits(choose: Chooser, choosing: Sequence[Case], scored: Sequence[Case]) -> float:
    return _hits(choose(choosing), scored)


def _hits(rule: Rule, cases: Sequence[Case]) -> float:
    return fmean(rule(case) == case.is_worse for case in cases)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]
