"""Report of a tuning, from files only."""

import json
import shutil
from pathlib import Path

import pytest

from powernorm.errors import InputError
from powernorm.json_reading import seal_json
from powernorm_lab.report.loading import read_comparison
from powernorm_lab.report.page import render_page
from powernorm_lab.report.results_document import results_document

STORED = Path(__file__).parents[4] / "benchmarks/results/papers/lm-demo-small-tuned"


def test_the_page_says_how_each_number_was_tuned() -> None:
    page = render_page(read_comparison(STORED))
    for words in (
        "Every norm had 12 trials (some given up early, all counted)",
        "5 finished, 7 given up",
        "log:0.001:0.032",
        "Best valid loss against the number of trials",
        "Importance of each setting, by norm",
        "valid loss against norm_options.rbn.mean_penalty",
        "Sampler: TPE of Optuna",
    ):
        assert words in page, words


def test_without_the_trials_there_are_no_slices(tmp_path: Path) -> None:
    shutil.copy(STORED / "results.json", tmp_path)
    page = render_page(read_comparison(tmp_path))
    assert "Best valid loss against the number of trials" in page
    assert "Every trial, by setting" not in page
    (tmp_path / "trials.csv").write_text("a,b\n1,2\n")
    assert "Every trial, by setting" not in render_page(read_comparison(tmp_path))


def test_results_name_the_command_the_budget_and_the_ranges() -> None:
    document = results_document([STORED])
    assert "### lm, demo, tuned" in document
    assert "`powernorm tune lm --preset demo --trials 12`" in document
    assert "| rbn | var_penalty | log:0.01:10 | 0.775 | 24 % |" in document


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_trials", "12", "tuning.num_trials is '12', expected a whole number"),
        ("select_by", {"metric": "valid_loss"}, "tuning.select_by.direction is missing"),
        ("norms", {"ln": {}}, "tuning.norms.ln.search is missing"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, key: str, value: object, words: str) -> None:
    results = json.loads((STORED / "results.json").read_text())
    results["tuning"][key] = value
    (tmp_path / "results.json").write_text(json.dumps(seal_json(results)))
    with pytest.raises(InputError, match=words):
        read_comparison(tmp_path)
