"""When a trial is given up: as Optuna's MedianPruner would, by limits that are fixed beforehand."""

import random
import warnings

import optuna
import pytest
from optuna.pruners import MedianPruner

from powernorm.lab.engine.trials import TrialRules, median_limits
from powernorm.runs import Goal

STEPS = range(10, 70, 10)


@pytest.mark.parametrize("direction", ["min", "max"])
def test_the_rule_is_optunas_median_pruner(direction: str) -> None:
    rng = random.Random(0)
    histories = [{step: rng.random() for step in STEPS} for _ in range(6)]
    goal = Goal(metric="valid", direction=direction)  # type: ignore[typeddict-item]
    limits = median_limits(histories[:5], at_least=4, first_step=20)
    assert min(limits) == 20
    rules = TrialRules.from_json(TrialRules(goal, {"ln": limits}).to_json())
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        study = optuna.create_study(
            direction=f"{direction}imize",
            pruner=MedianPruner(n_startup_trials=4, n_warmup_steps=20),
        )
    for history in histories[:5]:
        trial = study.ask()
        for step, value in history.items():
            trial.report(value, step)
        study.tell(trial, history[60])
    decided = set()
    for _ in range(20):
        trial, best = study.ask(), None
        for step in STEPS:
            value = rng.random() + (0.3 if direction == "min" else -0.3)
            trial.report(value, step)
            best = rules.better(best, value)
            assert rules.is_behind("ln", step, best) == trial.should_prune()
            decided.add(trial.should_prune())
    assert decided == {True, False}


def test_nothing_is_given_up_without_enough_trials_or_numbers() -> None:
    assert median_limits([{10: 1.0}] * 3, at_least=4, first_step=0) == {}
    rules = TrialRules(Goal(metric="valid", direction="min"), {"ln": {10: 1.0}})
    assert rules.is_behind("ln", 10, 2.0)
    assert not rules.is_behind("ln", 20, 2.0)
    assert not rules.is_behind("bn", 10, 2.0)
    assert not rules.is_behind("ln", 10, None)
