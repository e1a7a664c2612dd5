"""Conclusions at the top of a page, as far as seeds and baselines permit them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from lab.tests.report.synthetic import made_comparison, made_run, write_comparison
from syrupy.assertion import SnapshotAssertion

from powernorm_lab.report import Comparison, read_comparison, render_page, summarize
from powernorm_lab.report.conclusion import conclusion
from powernorm_lab.report.summary import best_rows

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


CASES: dict[str, Comparison] = {
    "better, worse and neither": compared(
        {
            "ln": [70.0, 70.1, 70.2, 70.1],
            "bn": [75.0, 75.2, 75.1, 75.2],
            "pn": [60.0, 60.1, 60.3, 60.1],
            "rms": [70.1, 70.0, 70.3, 70.0],
        }
    ),
    "less is better in a perplexity": compared(
        {"ln": [70.0, 70.1, 70.2], "bn": [75.0, 75.2, 75.1]}, metric="test_perplexity"
    ),
    "one seed": compared({"ln": [70.0], "bn": [99.0]}),
    "two seeds": compared({"ln": [70.0, 70.1], "bn": [99.0, 99.1]}),
    "one behind a baseline": compared(
        {"ln": [70.0, 70.1], "bn": [75.0, 75.2], "pn": [10.0, 10.1]}, {"majority": 60.0}
    ),
    "one with too few seeds": compared(
        {"ln": [70.0, 70.1, 70.2], "bn": [75.0, 75.1, 75.2], "pn": [99.0, 99.1]}
    ),
    "no reference": compared({"bn": [70.0, 71.0, 72.0], "pn": [70.0, 71.0, 72.0]}),
}


def best(comparison: Comparison) -> set[str]:
    return best_rows(summarize(comparison), comparison.measure)


@pytest.mark.parametrize("case", CASES)
def test_what_is_concluded(case: str, snapshot: SnapshotAssertion) -> None:
    shaded = ", ".join(sorted(best(CASES[case]))) or "none"
    assert "\n".join([*conclusion(CASES[case]), f"Shaded: {shaded}."]) == snapshot


def test_many_norms_give_no_false_alarm() -> None:
    """One of twenty equal norms has p < 5 % by chance and would be better without correction."""
    noise = [0.1, -0.1, 0.02, -0.02]
    lucky = {"ln": [70.0] * 4, "lucky": [70.3, 70.2, 70.25, 70.5]}
    assert conclusion(compared(lucky))[0].startswith("Better than ln")
    others = {f"n{index}": [70 + 3 * one for one in noise] for index in range(19)}
    found = conclusion(compared(lucky | others))
    assert not any(sentence.startswith(("Better", "Worse")) for sentence in found)
    assert "n10 and 8 more" in found[0]


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
