"""What stands in words on top: no more than the seeds and the baselines allow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lab.report.synthetic import made_comparison, made_run, write_comparison
from powernorm.lab.report import Comparison, read_comparison, render_page, summarize
from powernorm.lab.report.conclusion import conclusion
from powernorm.lab.report.summary import best_rows

METRIC = "test_accuracy"


def compared(
    values: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float] | None = None,
    metric: str = METRIC,
) -> Comparison:
    runs = [
        made_run(norm, seed, metrics={metric: value})
        for norm, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    ]
    known = [{"name": name, "metrics": {metric: one}} for name, one in (baselines or {}).items()]
    return made_comparison(runs, metric, baselines=known)


def best(comparison: Comparison) -> set[str]:
    return best_rows(summarize(comparison), comparison.measure)


def test_norms_that_differ_are_named_with_their_side() -> None:
    found = conclusion(
        compared(
            {
                "ln": [70.0, 70.1, 70.2, 70.1],
                "bn": [75.0, 75.2, 75.1, 75.2],
                "pn": [60.0, 60.1, 60.3, 60.1],
                "rms": [70.1, 70.0, 70.3, 70.0],
            }
        )
    )
    assert found[0].startswith("Better than ln in test accuracy: bn +5.03 (+4.")
    assert found[1].startswith("Worse than ln in test accuracy: pn -9.97 (-10.")
    assert found[2] == "Not told apart from ln by these seeds: rms."
    assert "at 5 %, corrected for 3 norms (Holm)" in found[3]


def test_less_is_better_in_a_perplexity() -> None:
    values = {"ln": [70.0, 70.1, 70.2], "bn": [75.0, 75.2, 75.1]}
    (first, *_) = conclusion(compared(values, metric="test_perplexity"))
    assert first.startswith("Worse than ln in test perplexity: bn +5.00")


def test_many_norms_give_no_false_alarm() -> None:
    """One of twenty that are alike has p < 5 % by chance: alone it would be called better."""
    noise = [0.1, -0.1, 0.02, -0.02]
    lucky = {"ln": [70.0] * 4, "lucky": [70.3, 70.2, 70.25, 70.5]}
    assert conclusion(compared(lucky))[0].startswith("Better than ln")
    others = {f"n{index}": [70 + 3 * one for one in noise] for index in range(19)}
    found = conclusion(compared(lucky | others))
    assert not any(sentence.startswith(("Better", "Worse")) for sentence in found)
    assert "n10 and 8 more" in found[0]


def test_one_seed_is_no_result_and_shades_nothing() -> None:
    comparison = compared({"ln": [70.0], "bn": [99.0]})
    assert conclusion(comparison)[0].startswith("One seed: no conclusion.")
    assert best(comparison) == set()


def test_two_seeds_are_too_few_for_the_test() -> None:
    comparison = compared({"ln": [70.0, 70.1], "bn": [99.0, 99.1]})
    assert conclusion(comparison)[0].startswith("2 seeds: no conclusion.")
    assert best(comparison) == {"bn"}


@pytest.mark.parametrize("baseline", [90.0, 75.0])
def test_no_winner_where_a_baseline_wins(baseline: float) -> None:
    values = {"ln": [70.0, 70.1, 70.2], "bn": [74.9, 75.1, 75.0]}
    comparison = compared(values, {"majority": baseline, "bag of words": 50.0})
    assert best(comparison) == set()
    assert conclusion(comparison)[0].startswith(
        f"No norm beats the majority baseline ({baseline:.2f})"
    )
    page = render_page(comparison)
    assert 'class="best"' not in page
    assert "is shaded" not in page
    assert "No norm beats the majority baseline" in page


def test_those_behind_a_baseline_are_named() -> None:
    values = {"ln": [70.0, 70.1], "bn": [75.0, 75.2], "pn": [10.0, 10.1]}
    comparison = compared(values, {"majority": 60.0})
    assert conclusion(comparison)[0] == "No better than the majority baseline (60.00): pn."
    assert best(comparison) == {"bn"}


def test_a_norm_with_too_few_seeds_is_not_tested() -> None:
    values = {"ln": [70.0, 70.1, 70.2], "bn": [75.0, 75.1, 75.2], "pn": [99.0, 99.1]}
    found = conclusion(compared(values))
    assert found[0].startswith("Better than ln in test accuracy: bn ")
    assert found[1] == "Fewer than 3 seeds, so no test: pn."
    assert found[2].startswith("By the paired t-test")
    assert "Holm" not in found[2]


def test_without_the_reference_there_is_no_test() -> None:
    (only,) = conclusion(compared({"bn": [70.0, 71.0, 72.0], "pn": [70.0, 71.0, 72.0]}))
    assert only == "No test: no seed finished both with ln and with another norm."


def test_runs_without_a_result_are_no_result(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "demo", norms=("bn", "pn"), seeds=(1,))
    comparison = read_comparison(folder)
    assert conclusion(comparison) == ["No run has finished with a result: no conclusion."]
    finished = [
        replace(run, status="finished", metrics={"test_perplexity": 3.0})
        if run.norm == "bn"
        else run
        for run in comparison.runs
    ]
    found = conclusion(replace(comparison, runs=finished))
    assert found == ["One norm has a result: nothing to compare.", "No finished run: pn (NaN)."]
