"""Every norm of a demo learns what its page promises."""

from collections.abc import Callable
from pathlib import Path

import pytest
from lab.tests.training.tiny_training import compare

from powernorm_lab.recipes import recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "metric", "is_good"),
    [
        ("lm", "test_perplexity", lambda found, unigram: found < unigram / 5),
        ("classify", "test_accuracy", lambda found, _: found > 68),
    ],
)
def test_every_norm_of_a_demo_learns(
    task: str,
    metric: str,
    is_good: Callable[[float, float], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "cache"))
    results = compare(recipe(task, "demo"), tmp_path / "out")
    unigram = results.baselines[0]["metrics"][metric]
    for run in results.runs:
        assert run.status == "finished"
        found = run.metrics[metric]
        assert found is not None
        assert unigram is not None
        assert is_good(found, unigram), run.norm
