"""Study of layer-scale: rates, rules, and tables from the stored rows."""

import json
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from study_modules import STUDIES, modules_of

FOLDER = STUDIES / "layer-scale"
PAGES = STUDIES.parent / "docs" / "results"


@pytest.fixture(scope="module")
def study() -> dict[str, ModuleType]:
    return modules_of("layer-scale", "arms", "rules", "scores", "run")


def test_the_tables_are_of_the_stored_rows(study: dict[str, ModuleType], tmp_path: Path) -> None:
    rows = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    study["scores"].write(tmp_path, rows)
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    stored = (PAGES / "translation").glob("layer-scale-*.csv")
    assert written == {path.name: path.read_text(encoding="utf-8") for path in stored}


def test_rates_are_the_best_of_the_trials(study: dict[str, ModuleType]) -> None:
    trials = json.loads((FOLDER / "trials.json").read_text(encoding="utf-8"))
    rates = study["arms"].best_rates(trials)
    assert rates == dict.fromkeys(study["arms"].ARMS, 4e-3) | {"rbn": 5.6e-3}
    (rbn,) = (
        one for one in study["arms"].comparison("reduced", rates).variants if one.norm == "rbn"
    )
    assert rbn.settings == {"optimizer.learning_rate": "0.0056"}


@pytest.mark.parametrize(("gap", "word"), [(1.0, "shown"), (-1.0, "contradicted"), (0.0, "level")])
def test_a_complete_setting_is_judged(study: dict[str, ModuleType], gap: float, word: str) -> None:
    noise = Random(0)
    rows = [
        {"setting": "reduced", "arm": arm, "seed": seed, "bleu": 20 + 0.1 * noise.random()}
        | {"chrf": 40.0, "test_loss": 2.5, "learning_rate": 4e-3, "bleu_interval": 0.8}
        for seed in range(10, 15)
        for arm in study["arms"].ARMS
    ]
    for row in rows:
        row["bleu"] += gap * (row["arm"] == "ln")
    found = study["scores"].tables(rows)
    assert list(found) == ["layer-scale-reduced", "layer-scale-reduced-differences"]
    claims = found["layer-scale-reduced-differences"].set_index("claim")
    assert claims.loc["S3, W2: BN is behind LN", "outcome"] == word
    assert not study["scores"].tables(rows[1:])  # nothing is compared before all runs are over
