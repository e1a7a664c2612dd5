"""Pruning of trials as by Optuna's MedianPruner, by limits that are fixed beforehand."""

import json
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from lab.tests.training.tiny_training import Configure
from optuna.pruners import MedianPruner
from torch import nn

from powernorm_lab.engine.events import Event, RunEnded, StepsDone
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.trials import Limits, TrialRules, median_limits
from powernorm_lab.own_grid import own_grid
from powernorm_lab.runs import Goal, RunResult
from powernorm_lab.schema import record_of
from powernorm_lab.settings.comparison import Notes
from powernorm_lab.tasks.builtin import grid_of

STEPS = range(10, 70, 10)


@pytest.mark.parametrize("direction", ["min", "max"])
def test_the_rule_is_optunas_median_pruner(direction: str) -> None:
    rng = random.Random(0)
    histories = [{step: rng.random() for step in STEPS} for _ in range(6)]
    goal = Goal(metric="valid", direction=direction)  # type: ignore[typeddict-item]
    limits = median_limits(histories[:5], at_least=4, first_step=20)
    assert min(limits) == 20
    stored = json.loads(json.dumps(TrialRules(goal, {"ln": limits}).to_json()))
    rules = record_of(TrialRules, stored, "work.json", "", exact=True)
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


def valued(
    run: Run,
    *,
    values: str = "2",
    steps: int = 4,  # noqa: ARG001
    own_loop: bool = False,
) -> dict[str, float]:
    """Log the given valid losses, step by step, with a checkpoint after each."""
    model = run.swap(nn.Sequential(nn.LayerNorm(4)))
    run.track(model=model)
    listed = [float(value) for value in values.split(",")]
    if own_loop:
        for step, value in enumerate(listed, start=1):
            run.log(step, valid_loss=value)
            if run.should_stop:
                break
    else:
        for step, _ in run.steps([None], checkpoint_every=1):
            run.log(step, train_loss=1.0, valid_loss=listed[step - 1])
    return {"valid_loss": listed[-1], "last": float(run.step)}


def trained(out: Path, limits: Limits, resume: bool = False, **changes: Any) -> RunResult:
    """Return the result of one trial."""
    settings = {key: value for key, value in changes.items() if key != "on_event"}
    grid = own_grid(
        valued,
        norms=["bn"],
        seeds=[0],
        goal={"valid_loss": "min"},
        settings=settings,
        norm_options={},
        device="cpu",
    )
    rules = TrialRules(Goal(metric="valid_loss", direction="min"), {"bn": limits})
    found = compare_grid(
        replace(grid, trial=rules), out, resume=resume, on_event=changes.get("on_event")
    )
    return found.runs[0]


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_trial_that_is_behind_ends_there(tmp_path: Path, own_loop: bool) -> None:
    given: Any = {"values": "3,2,2,2", "own_loop": own_loop}
    result = trained(tmp_path, {2: 1.5, 3: 2.5}, **given)
    assert result.status == "pruned"
    assert result.metrics == {}
    words = "worse than the median of the earlier trials"
    assert words in result.message
    last = (tmp_path / "bn-seed0" / "metrics.csv").read_text().splitlines()[-1]
    assert last.startswith("2,")
    # A trial that is over is not trained again.
    events: list[Event] = []
    again = trained(tmp_path, {2: 1.5}, resume=True, on_event=events.append, **given)
    assert again == result
    assert all(isinstance(event, RunEnded) and event.skipped for event in events)


def test_what_was_reached_before_an_interruption_counts_after_it(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, StepsDone) and event.step == 3:
            raise KeyboardInterrupt

    given: Any = {"values": "0.5,2,2,2"}
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, {3: 1.0}, on_event=interrupt, **given)
    result = trained(tmp_path, {3: 1.0}, resume=True, **given)
    assert (result.status, result.metrics["last"]) == ("finished", 4)


def test_a_trial_of_a_built_in_task_ends_at_the_validation_where_it_is_behind(
    configure: Configure, tmp_path: Path
) -> None:
    goal = Goal(metric="valid_loss", direction="min")
    grid = grid_of(configure(norms=("bn",)), Notes(goal))
    ended = {}
    for name, limit in (("behind", 0.0), ("before", 1e9)):
        rules = TrialRules(goal, {"bn": {8: limit}})
        found = compare_grid(replace(grid, trial=rules), tmp_path / name)
        ended[name] = found.runs[0]
    assert ended["behind"].status == "pruned"
    assert "given up after step 8" in ended["behind"].message
    assert not ended["behind"].metrics
    assert ended["before"].status == "finished"
    assert ended["before"].metrics["valid_loss"] is not None
    rows = (tmp_path / "behind" / "bn-pre-seed0" / "metrics.csv").read_text().splitlines()
    assert rows[-1].startswith("8,")
