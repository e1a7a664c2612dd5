"""The study of the field's next norms: its page is of its rows, its rules judge as they say."""

import json
from types import ModuleType
from typing import Any

import pytest
import torch
from study_modules import STUDIES, modules_of

import powernorm

FOLDER = STUDIES / "next-norms"


@pytest.fixture(scope="module")
def study() -> dict[str, ModuleType]:
    return modules_of("next-norms", "rules", "arms", "run")


def stored(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return rows


def test_the_page_is_of_the_stored_rows(study: dict[str, ModuleType]) -> None:
    assert study["run"].page(stored("results.json")) == (FOLDER / "results.md").read_text("utf-8")


def test_every_arm_has_the_best_rate_of_its_trials(study: dict[str, ModuleType]) -> None:
    for row in stored("results.json"):
        tuned_as = study["arms"].ARMS[row["arm"]].tuned_as or row["arm"]
        best = study["run"].best_rate(stored("trials.json"), tuned_as)
        assert row["learning_rate"] == best


def test_missing_runs_give_no_conclusion(study: dict[str, ModuleType]) -> None:
    rows = [row for row in stored("results.json") if (row["arm"], row["seed"]) != ("lns", 3)]
    assert "| no conclusion | 1 runs are missing |" in study["run"].page(rows)


@pytest.mark.parametrize(
    ("input_gap", "output_gap", "word"),
    [(-0.1, 0.1, "shown"), (-0.1, 0.0, "open"), (0.1, 0.1, "contradicted")],
)
def test_both_parts_of_the_claim_about_decay_count(
    study: dict[str, ModuleType], input_gap: float, output_gap: float, word: str
) -> None:
    noise = (0.01, -0.01, 0.02, -0.02, 0.0)
    losses = {
        arm: {seed: 2.0 + gap + noise[seed] * (arm != "peri") for seed in range(5)}
        for arm, gap in (("peri", 0.0), ("peri-input", input_gap), ("peri-output", output_gap))
    }
    assert study["rules"].decay(losses)[0] == word


def test_saturation_is_judged_by_rank(study: dict[str, ModuleType]) -> None:
    shares = {f"dyt-{i}": {seed: 0.1 * i + 0.01 * seed for seed in range(5)} for i in range(4)}
    losses = {arm: {seed: 2.0 + row[seed] for seed in row} for arm, row in shares.items()}
    losses["pre"] = dict.fromkeys(range(5), 2.0)
    assert study["rules"].saturation(losses, shares)[0] == "shown"


@pytest.mark.parametrize("placement", ["pre", "post", "peri", "lns", "hybrid"])
def test_no_model_sees_a_later_character(study: dict[str, ModuleType], placement: str) -> None:
    model = study["arms"].CharacterModel(placement, powernorm.LayerNorm).eval()
    characters = torch.randint(128, (2, 6))
    changed = characters.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 128
    torch.testing.assert_close(model(characters)[:, :4], model(changed)[:, :4])


def test_roles_of_gammas(study: dict[str, ModuleType]) -> None:
    model = study["arms"].CharacterModel("peri", powernorm.LayerNorm)
    names = {which: study["arms"].decayed_norms(model, which) for which in ("input", "output")}
    assert [len(one) for one in names.values()] == [25, 24]
    assert sorted(names["input"] + names["output"]) == sorted(
        study["arms"].decayed_norms(model, "all")
    )
