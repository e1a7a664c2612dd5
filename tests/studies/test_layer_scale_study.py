"""Study of layer-scale: rates, rules, and page from the stored rows."""

import json
from random import Random
from types import ModuleType

import pytest
from study_modules import STUDIES, modules_of

FOLDER = STUDIES / "layer-scale"


@pytest.fixture(scope="module")
def study() -> dict[str, ModuleType]:
    return modules_of("layer-scale", "arms", "rules", "scores", "run")


def test_the_page_is_of_the_stored_rows(study: dict[str, ModuleType]) -> None:
    rows = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    page = "# Results\n\n" + "\n".join(study["scores"].tables(rows))
    assert page == (FOLDER / "results.md").read_text(encoding="utf-8")


def test_rates_are_the_best_of_the_trials(study: dict[str, ModuleType]) -> None:
    trials = json.loads((FOLDER / "trials.json").read_text(encoding="utf-8"))
    rates = study["arms"].best_rates(trials)
    assert rates == dict.fromkeys(study["arms"].ARMS, 4e-3) | {"rbn": 5.6e-3}
    (rbn,) = (
        one for one in study["arms"].comparison("reduced", rates).variants if one.norm == "rbn"
    )
    assert rbn.settings == {"optimizer.learning_rate": "0.0056"}


@pytest.mark.parametrize(
    ("gap", "word"), [(1.0, "**shown**"), (-1.0, "**contradicted**"), (0.0, "level")]
)
def test_a_complete_setting_is_judged(study: dict[str, ModuleType], gap: float, word: str) -> None:
    noise = Random(0)
    rows = [
        {"setting": "reduced", "arm": arm, "seed": seed, "bleu": 20 + 0.1 * noise.random()}
        | {"chrf": 40.0, "test_loss": 2.5, "learning_rate": 4e-3}
        for seed in range(10, 15)
        for arm in study["arms"].ARMS
    ]
    for row in rows:
        row["bleu"] += gap * (row["arm"] == "ln")
    (line,) = (one for one in study["scores"].tables(rows) if one.startswith("| S3, W2"))
    assert line.endswith(f"{word} |")
