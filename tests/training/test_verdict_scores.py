import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powernorm.training.verdict_scores import (
    Case,
    advice_scores,
    auc,
    best_threshold,
    half_split,
    rank_correlation,
    scores_of,
    wilson_interval,
)
from powernorm.verdict_runs import PredictorScore

NUMBERS = st.lists(st.tuples(st.integers(-5, 5).map(float), st.booleans()), min_size=1, max_size=12)


def case(
    name: str,
    value: float,
    gap: float,
    *,
    group: str = "g",
    verdict: bool | None = None,
    others: dict[str, float] | None = None,
) -> Case:
    return Case(name, group, gap, abs(gap) > 0.5, {"tid": value, **(others or {})}, verdict)


def score(cases: list[Case], predictor: str, *predictors: str) -> PredictorScore:
    choosing = {c.name for c in half_split(cases, 0)[0]}
    (found,) = [
        row
        for row in scores_of("bn", cases, predictors or ("tid",), choosing)
        if row["predictor"] == predictor
    ]
    return found


@given(NUMBERS)
def test_the_best_threshold_is_best_among_all(pairs: list[tuple[float, bool]]) -> None:
    values, worse = [v for v, _ in pairs], [w for _, w in pairs]

    def hits(limit: float) -> int:
        return sum((value > limit) == bad for value, bad in pairs)

    grid = [x / 4 for x in range(-24, 25)]
    assert hits(best_threshold(values, worse)) == max(map(hits, grid))


def test_of_equally_good_thresholds_the_middle_one_is_taken() -> None:
    # -∞, 2.5 and 4.5 have three right signs each.
    assert best_threshold([1, 2, 3, 4, 5], [True, False, True, False, True]) == 2.5
    assert best_threshold([1, 3], [True, True]) == -math.inf
    assert best_threshold([1, 3], [False, False]) == math.inf
    # 1.5 and 8.5: the lower of two.
    assert best_threshold([1, 2, 8, 9], [False, True, False, True]) == 1.5


@given(NUMBERS)
def test_auc_counts_pairs(pairs: list[tuple[float, bool]]) -> None:
    values, worse = [v for v, _ in pairs], [w for _, w in pairs]
    wins = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, bad in pairs
        for b, other in pairs
        if bad and not other
    ]
    found = auc(values, worse)
    assert found == (pytest.approx(sum(wins) / len(wins)) if wins else None)


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 100, 1000, math.inf]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # By hand: ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3: 4.5 / √(4.5 · 5).
    assert rank_correlation([1, 2, 2, 5], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2], [1, 2]) is None


def test_wilson_interval_has_the_known_numbers() -> None:
    # Newcombe 1998, Table I: 81 of 263.
    low, high = wilson_interval(81 / 263, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert wilson_interval(1.0, 4)[1] == 1.0


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=30), st.integers(0, 9))
def test_halves_are_even_in_every_group(groups: list[str], seed: int) -> None:
    cases = [case(str(i), 0, 1, group=group) for i, group in enumerate(groups)]
    choosing, scored = half_split(cases, seed)
    assert {c.name for c in choosing} | {c.name for c in scored} == {c.name for c in cases}
    assert len(choosing) + len(scored) == len(cases)
    assert abs(len(choosing) - len(scored)) <= 1
    for group in "abc":
        first = sum(c.group == group for c in choosing)
        second = sum(c.group == group for c in scored)
        assert abs(first - second) <= 1
    assert half_split(cases, seed) == (choosing, scored)


def test_a_predictor_that_is_right_everywhere() -> None:
    cases = [case(str(i), i, 1.0 if i >= 6 else -1.0) for i in range(12)]
    found = score(cases, "tid")
    assert found["auc"] == 1
    assert found["num_positive"] == 6
    assert found["hits_choosing"] == 1
    assert found["threshold"] is not None
    assert 2 < found["threshold"] < 9
    assert found["leave_one_out"] >= 10 / 12
    assert found["num_scored"] == 6


def test_scored_settings_have_no_say_in_the_threshold() -> None:
    cases = [case(str(i), i, 1.0 if i >= 6 else -1.0) for i in range(12)]
    before = score(cases, "tid")
    choosing, _ = half_split(cases, 0)
    names = {c.name for c in choosing}
    turned = [c if c.name in names else case(c.name, c.values["tid"], -c.gap) for c in cases]
    after = score(turned, "tid")
    assert after["threshold"] == before["threshold"]
    assert after["hits_choosing"] == before["hits_choosing"]
    assert after["hits_scored"] == pytest.approx(1 - before["hits_scored"])


def test_a_quantity_that_says_nothing_is_near_a_half() -> None:
    rng = random.Random(0)
    cases = [case(str(i), rng.random(), rng.choice([1.0, -1.0])) for i in range(60)]
    found = score(cases, "tid")
    assert 0.35 < found["splits_mean"] < 0.65
    low, high = found["splits_interval"]
    assert low <= found["splits_mean"] <= high


def test_few_tokens_in_a_batch_are_the_bad_sign() -> None:
    cases = [
        case(str(i), 0, 1.0 if i < 6 else -1.0, others={"tokens_per_batch": 100.0 * (i + 1)})
        for i in range(12)
    ]
    found = score(cases, "tokens_per_batch", "tokens_per_batch")
    assert found["auc"] == 1
    assert found["threshold"] is not None
    assert 300 < found["threshold"] < 1000


def test_rivals_are_scored_by_their_rules() -> None:
    gaps = [1.0, 1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 1.0]
    early = [0.1, 0.1, -0.1, -0.1, 0.1, 0.1, 0.1, 0.1]
    cases = [
        case(str(i), 0, gap, verdict=i % 2 == 0, others={"early_gap": value})
        for i, (gap, value) in enumerate(zip(gaps, early, strict=True))
    ]
    sign = score(cases, "early_gap > 0", "early_gap")
    # Six of eight, wherever the halves fall; nothing is chosen.
    assert sign["leave_one_out"] == 6 / 8
    assert sign["splits_mean"] == pytest.approx(6 / 8, abs=0.03)
    assert sign["threshold"] is None
    assert score(cases, "majority")["leave_one_out"] == 6 / 8
    assert score(cases, "verdict")["leave_one_out"] == 6 / 8


def test_pairs_of_like_batches_show_what_the_size_does_not_say() -> None:
    # The quantity follows the size of the batch, and within a size it says the opposite.
    cases = [
        case(f"{size}-{gap}", 100 / size - gap, gap, others={"tokens_per_batch": size})
        for size in (10.0, 11.0, 100.0)
        for gap in (-1.0, 1.0)
    ]
    found = score(cases, "tid")
    assert found["num_alike"] == 2 * 2 + 1
    # Values 9 and 8.1 of the worse are below 11 and 10.1 of the better.
    assert found["auc_alike"] == 0
    assert score(cases, "tokens_per_batch", "tokens_per_batch")["auc_alike"] == 0.5
    assert score(cases, "majority")["auc_alike"] is None


def test_settings_without_the_quantity_are_left_out_of_its_score() -> None:
    cases = [case(str(i), i, 1.0 if i > 3 else -1.0) for i in range(8)]
    cases += [Case(f"{i}-lost", "g", math.inf, True, {}, None) for i in range(2)]
    assert score(cases, "tid")["num_settings"] == 8
    assert score(cases, "majority")["num_settings"] == 10


def test_clear_gaps_are_counted_apart() -> None:
    cases = [case(str(i), i, (1.0 if i % 4 else 0.1) * (1 if i >= 6 else -1)) for i in range(12)]
    found = score(cases, "tid")
    assert found["num_clear"] == 9
    assert found["leave_one_out_clear"] is not None


@pytest.mark.parametrize(("num_worse", "name"), [(5, "always worse"), (3, "always better")])
def test_the_constant_is_the_one_that_is_right_more_often(num_worse: int, name: str) -> None:
    cases = [case(str(i), i, 1.0 if i < num_worse else -1.0) for i in range(8)]
    found = score(cases, name)
    assert found["leave_one_out"] == 5 / 8
    assert found["splits_mean"] == pytest.approx(5 / 8, abs=0.03)
    assert found["threshold"] is None


def test_the_majority_suffers_where_the_constant_does_not() -> None:
    # Half of each: whatever the choosing half has more of, the scored one has less of.
    cases = [case(str(i), i, 1.0 if i % 2 else -1.0) for i in range(8)]
    assert score(cases, "majority")["leave_one_out"] == 0
    assert score(cases, "always worse")["leave_one_out"] == 0.5


def test_leaving_a_group_out_leaves_its_twins_out() -> None:
    # Within each text the quantity is right at once; between the texts it is the wrong way round.
    low = [case(f"a{i}", float(i), 1.0 if i >= 2 else -1.0, group="a") for i in range(4)]
    high = [case(f"b{i}", 10.0 + i, 1.0 if i >= 2 else -1.0, group="b") for i in range(4)]
    found = score([*low, *high], "tid")
    # Chosen on a: 1.5, below all of b; chosen on b: 11.5, above all of a.
    assert found["leave_one_group_out"] == 0.5
    assert score(low, "tid")["leave_one_group_out"] is None


def test_the_early_gap_by_batch_statistics_has_rules_of_its_own() -> None:
    cases = [
        case(
            str(i),
            0,
            1.0 if i >= 6 else -1.0,
            others={"early_gap": 1.0, "early_gap_batch": 1.0 if i >= 6 else -1.0},
        )
        for i in range(12)
    ]
    predictors = ("early_gap", "early_gap_batch")
    assert score(cases, "early_gap > 0", *predictors)["leave_one_out"] == 0.5
    assert score(cases, "early_gap_batch > 0", *predictors)["leave_one_out"] == 1
    assert score(cases, "early_gap_batch", *predictors)["auc"] == 1


def test_the_division_is_given_and_cut_down_to_what_is_known() -> None:
    cases = [case(str(i), i, 1.0 if i >= 6 else -1.0) for i in range(12)]
    names = ["0", "1", "2", "9", "10", "elsewhere"]
    (found,) = [row for row in scores_of("bn", cases, ("tid",), names) if row["predictor"] == "tid"]
    assert found["num_scored"] == 12 - 5
    assert found["threshold"] == (2 + 9) / 2
    assert found["hits_scored"] == 1


def test_a_lost_layer_norm_is_a_better_norm() -> None:
    cases = [case(str(i), i, -math.inf if i < 6 else math.inf) for i in range(12)]
    found = score(cases, "tid")
    assert found["num_positive"] == 6
    assert found["auc"] == 1
    assert found["rank_correlation"] is not None


def test_following_advice_is_counted_beside_always_taking_one_norm() -> None:
    gaps = [
        {"bn": -0.1, "rbn": -0.105, "pn": 0.2},
        {"bn": 0.005, "rbn": math.inf, "pn": -0.5},
        {"bn": math.inf, "rbn": 0.3, "pn": 0.02},
        {"bn": -math.inf, "rbn": 0.0, "pn": -math.inf},
    ]
    rows = {
        row["rule"]: (row["num_no_worse"], row["num_best"])
        for row in advice_scores(gaps, ["bn", "bn", "ln", "pn"], 0.01)
    }
    assert rows == {"advice": (4, 3), "ln": (4, 1), "bn": (3, 2), "rbn": (2, 1), "pn": (2, 2)}
    assert advice_scores([], [], 0.01) == []


def test_nothing_is_scored_without_two_halves() -> None:
    assert scores_of("bn", [case("a", 1, 1)], ("tid",), ["a"]) == []
    assert scores_of("bn", [case("a", 1, 1), case("b", 1, 1)], ("tid",), ["a", "b"]) == []
    assert scores_of("bn", [], ("tid",), []) == []
