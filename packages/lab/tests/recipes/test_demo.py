from pathlib import Path

import pytest
from lab.tests.training.tiny_training import compare

from powernorm_lab.recipes import recipe


@pytest.mark.slow
def test_every_norm_of_the_demo_ends_below_a_fifth_of_the_unigram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "cache"))
    results = compare(recipe("lm", "demo"), tmp_path / "out")
    unigram = results.baselines[0]["metrics"]["test_perplexity"]
    assert unigram is not None
    for run in results.runs:
        assert run.status == "finished"
        perplexity = run.metrics["test_perplexity"]
        assert perplexity is not None
        assert perplexity < unigram / 5, run.norm
