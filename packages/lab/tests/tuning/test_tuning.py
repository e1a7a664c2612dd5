"""Equal budgets of trials: selection on the valid split, resuming, and files."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import valleys
from lab.tests.training.same_runs import assert_same_folder
from lab.tests.training.tiny_training import STEPS, Configure

import powernorm_lab as lab
from covering import some_default
from powernorm.errors import InputError
from powernorm_lab.engine.events import Event, RunStarted
from powernorm_lab.engine.executors.local import available_cores
from powernorm_lab.engine.leases import Lease, LeaseHeldError
from powernorm_lab.settings.training import SmoothedTrainingSettings
from powernorm_lab.tuning.norm_studies import NormStudy

SEARCH = {"learning_rate": "log:1e-5:1"}
GOAL = {"test_loss": "min"}
UNSEARCHED = '{"identity": {}, "norms": {"ln": {"curve": []}}, "compared": {}, "round_size": 1}'


@pytest.fixture(autouse=True)
def _quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    yield
    optuna.logging.set_verbosity(before)


def tuned(out: Path, function: Any = valleys.train, **changes: Any) -> lab.Comparison:
    chosen: dict[str, Any] = {"norms": ["ln", "bn"], "trials": 7, "search": SEARCH, "goal": GOAL}
    chosen |= {"device": "cpu", "num_threads": 1, "quiet": True, **changes}
    return lab.tune(function, out, **chosen)


def rows_of(out: Path) -> list[dict[str, str]]:
    """Return the rows of trials.csv without times."""
    with (out / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["seconds"]
    return rows


def said(out: Path) -> dict[str, Any]:
    """Return the contents of the files without times and dates."""
    results = json.loads((out / "results.json").read_text())
    runs = [{**run, "seconds": None, "ran_on": None} for run in results["runs"]]
    tuning = json.loads((out / "tuning.json").read_text())
    return {"rows": rows_of(out), "runs": runs, "tuning": tuning, "head": results["tuning"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted tuning, which tests only read."""
    out = tmp_path_factory.mktemp("whole")
    tuned(out, seeds=2)
    return out


def test_every_norm_has_the_same_budget_and_pruned_trials_count(whole: Path) -> None:
    rows = rows_of(whole)
    assert Counter(row["norm"] for row in rows) == {"ln": 7, "bn": 7}
    statuses = Counter(row["status"] for row in rows)
    assert statuses.keys() == {"finished", "pruned"}
    record = json.loads((whole / "tuning.json").read_text())["norms"]
    assert all(sum(norm["trials"].values()) == len(norm["curve"]) == 7 for norm in record.values())
    # Optuna's own tools can read it, too.
    storage = optuna.storages.RDBStorage(f"sqlite:///{whole / 'optuna.db'}")
    for norm in ("ln", "bn"):
        trials = optuna.load_study(study_name=norm, storage=storage).trials
        assert [trial.state.name for trial in trials] == [
            {"finished": "COMPLETE", "pruned": "PRUNED"}[row["status"]]
            for row in rows
            if row["norm"] == norm
        ]
    storage.engine.dispose()


def test_the_best_is_chosen_on_valid_not_on_test(whole: Path) -> None:
    rows = [row for row in rows_of(whole) if row["status"] == "finished"]
    trials = json.loads((whole / "trials" / "results.json").read_text())["runs"]
    tests = {run["folder"]: run["metrics"].get("test_loss") for run in trials}
    for norm, tuning in json.loads((whole / "tuning.json").read_text())["norms"].items():
        own = [row for row in rows if row["norm"] == norm]
        best = min(own, key=lambda row: float(row["value"]))
        assert tuning["best"]["trial"] == int(best["trial"])
        rate = float(best["learning_rate"])
        assert tuning["best"]["settings"]["learning_rate"] == rate
        # The chosen trial has the worst test loss.
        assert tests[best["folder"]] == max(tests[row["folder"]] for row in own)
        for config in whole.glob(f"{norm}-seed*/config.json"):
            used = json.loads(config.read_text())["settings"]["learning_rate"]
            assert used == rate
    # The tuned value is closer to the minimum than the untuned one.
    curve = json.loads((whole / "tuning.json").read_text())["norms"]["ln"]["curve"]
    assert curve == sorted(curve, reverse=True)
    assert curve[-1] < curve[0]


def test_the_comparison_has_other_seeds_and_says_how_it_was_tuned(whole: Path) -> None:
    found = lab.read_comparison(whole)
    assert [(run.name, run.seed) for run in found.runs] == [
        (norm, seed) for norm in ("ln", "bn") for seed in (0, 1)
    ]
    assert {row["folder"].rpartition("seed")[2] for row in rows_of(whole)} == {"1000"}
    assert found.tuning is not None
    assert found.tuning["num_trials"] == 7
    assert found.tuning["norms"]["ln"]["search"] == SEARCH
    page = (whole / "report.html").read_text()
    assert "How the settings were chosen" in page
    for words in ("log:1e-5:1", "Best valid loss against the number", "Every trial, by setting"):
        assert words in page
    assert not list(whole.glob("trials/*/checkpoints"))


def test_a_second_call_trains_nothing(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    events: list[Event] = []
    tuned(tmp_path, seeds=2, resume=True, on_event=events.append)
    assert not [event for event in events if isinstance(event, RunStarted)]
    assert said(tmp_path) == said(whole)


@pytest.mark.parametrize("number", some_default([1, 6, 14, 16], 6))
def test_an_interrupted_tuning_goes_on_as_if_it_had_not_been(
    whole: Path, tmp_path: Path, number: int
) -> None:
    left = [number]

    def interrupt(event: Event) -> None:
        left[0] -= isinstance(event, RunStarted)
        if not left[0]:
            left[0] = -1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, seeds=2, on_event=interrupt)
    tuned(tmp_path, seeds=2, resume=True)
    assert said(tmp_path) == said(whole)


@pytest.mark.parametrize(
    ("method", "number"), [("_ask", 4), ("tell", 2), ("tell", 9), ("tell", 14)]
)
@pytest.mark.slow
def test_a_tuning_that_was_killed_between_two_trials_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    original, left = getattr(NormStudy, method), [number]

    def killed(self: NormStudy, *arguments: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise SystemExit(137)
        original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(NormStudy, method, killed)
        with pytest.raises(SystemExit):
            tuned(tmp_path, seeds=2)
    tuned(tmp_path, seeds=2, resume=True)
    assert said(tmp_path) == said(whole)
    assert_same_folder(whole, tmp_path)


@pytest.mark.slow
def test_more_trials_and_norms_join_later(whole: Path, tmp_path: Path) -> None:
    tuned(tmp_path, trials=1, seeds=2)
    first = json.loads((tmp_path / "ln-seed0" / "config.json").read_text())
    tuned(tmp_path, seeds=2, resume=True)
    assert rows_of(tmp_path) == rows_of(whole)
    # The runs of the comparison have only the new settings.
    assert json.loads((tmp_path / "ln-seed0" / "config.json").read_text()) != first
    assert said(tmp_path) == said(whole)
    found = tuned(tmp_path, norms=["ln", "bn", "rbn"], seeds=2, resume=True)
    assert Counter(row["norm"] for row in rows_of(tmp_path)) == {"ln": 7, "bn": 7, "rbn": 7}
    assert found.names == ["ln", "bn", "rbn"]


@pytest.mark.slow
@pytest.mark.skipif(available_cores() < 2, reason="one core")
def test_two_workers_come_to_the_same(tmp_path: Path) -> None:
    for jobs in (1, 2):
        tuned(tmp_path / str(jobs), trials=2, jobs=jobs)
    one, two = (said(tmp_path / str(jobs)) for jobs in (1, 2))
    assert one == two
    assert (tmp_path / "2" / "trials" / "workers").is_dir()


@pytest.mark.slow
def test_own_ranges_are_kept_to(tmp_path: Path) -> None:
    search = {
        "learning_rate": "fixed",
        "width": "linear:0.5:2",
        "depth": "int:1:3",
        "norm_options.bn.momentum": "choice:0.1,0.2,none",
        "norm_options.pn.warmup_steps": "int:1:5",
        "steps": "choice:4,6",
    }
    tuned(tmp_path, norms=["ln", "bn", "pn"], trials=4, search=search, prune=False)
    rows = rows_of(tmp_path)
    assert "learning_rate" not in rows[0]
    # The first trial has the untuned settings that are within their ranges.
    assert [(row["width"], row["steps"]) for row in rows if row["trial"] == "0"] == [
        ("1.0", "6")
    ] * 3
    # The default warm-up of a run is a tenth of its steps.
    assert rows[-4]["norm_options.pn.warmup_steps"] == "1"
    assert all(0.5 <= float(row["width"]) <= 2 and row["depth"] in "123" for row in rows)
    assert {row["steps"] for row in rows} <= {"4", "6"}
    momenta = {row["norm_options.bn.momentum"] for row in rows if row["norm"] == "bn"}
    assert momenta <= {"0.1", "0.2", ""}
    assert all(row["status"] == "finished" for row in rows)


def test_a_trial_that_fails_counts_and_a_norm_of_failures_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no trial of ln was completed .*trials\.csv"):
        tuned(tmp_path, valleys.failing, trials=3, search={"learning_rate": "log:1e-3:1e-2"})
    statuses = {(row["norm"], row["status"]) for row in rows_of(tmp_path)}
    assert statuses == {("ln", "failed"), ("bn", "finished")}
    # Without it the others are compared.
    with pytest.raises(InputError, match="has trials of ln, bn: name ln among the norms"):
        tuned(tmp_path, valleys.failing, norms=["bn"], trials=3, resume=True)
    with pytest.raises(
        InputError, match="every trial failed, the first one by ValueError: no rate"
    ):
        tuned(tmp_path / "all", valleys.failing, norms=["ln"])


def test_a_built_in_task_is_tuned_without_its_test_data(
    configure: Configure, tmp_path: Path
) -> None:
    training = SmoothedTrainingSettings(**{**STEPS, "max_steps": 6, "validate_every": 2})
    config = configure(norms=("ln", "rbn"), training=training)
    found = lab.tune(
        config,
        tmp_path,
        trials=2,
        search={"norm_options.rbn.var_penalty": "choice:0.5,5"},
        quiet=True,
    )
    trials = json.loads((tmp_path / "trials" / "results.json").read_text())["runs"]
    assert len(trials) == 4
    for trial in trials:
        assert trial["metrics"]["valid_loss"] is not None
        assert trial["metrics"].get("test_loss") is None
        assert trial["tid"] is None
    assert all(run.metrics["test_loss"] is not None for run in found.runs)
    assert [run.name for run in found.runs] == ["ln", "rbn"]
    keys = ["optimizer.learning_rate", "schedule.warmup_fraction"]
    options = [f"norm_options.rbn.{name}" for name in ("momentum", "mean_penalty", "var_penalty")]
    assert found.tuning is not None
    assert list(found.tuning["norms"]["ln"]["search"]) == keys
    assert list(found.tuning["norms"]["rbn"]["search"]) == [*keys, *options]
    best = found.tuning["norms"]["rbn"]["best"]
    assert best is not None
    used = json.loads((tmp_path / "rbn-pre-seed0" / "config.json").read_text())
    assert used["optimizer"]["learning_rate"] == best["settings"]["optimizer.learning_rate"]
    assert used["norm_options"]["var_penalty"] == best["settings"][options[2]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trials": 0}, "trials is 0: give at least 1"),
        ({"norms": ["lnn"]}, "unknown norm 'lnn'.*did you mean 'ln'"),
        ({"tuning_seed": 0}, r"the seed 0 of the trials is one of the comparison's \(0\)"),
        ({"search": {}}, "nothing to tune for ln: give a range"),
        ({"search": {"learning_rat": "log:1:2"}}, "did you mean learning_rate?"),
        ({"search": {"learning_rate": "log:2:1"}}, "2 is not below 1"),
        ({"search": {"learning_rate": "choice:0.1,fast"}}, "learning_rate=fast"),
        ({"search": {"steps": "linear:5:8"}}, r"steps=5\.95.* valid integer"),
        (
            {"search": {**SEARCH, "norm_options.bn.mean_penalty": "log:1:2"}},
            "has no option 'mean_penalty'",
        ),
        ({"search": {"norm_options.rbn.momentum": "log:1:2"}}, "rbn is not among the norms"),
        ({"goal": {"accuracy": "max"}}, "trials have no selection metric"),
        ({"select_by": {"a": "min", "b": "min"}}, "name one metric of the valid split"),
        ({"jobs": 2, "executor": "here"}, "choose local, ray, slurm"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        tuned(tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()


def test_two_never_tune_in_one_folder(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    try:
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()}"):
            tuned(tmp_path)
    finally:
        lease.release(forget=True)
    assert not (tmp_path / "tuning.json").exists()


def test_folders_of_others_are_refused_and_kept(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    shutil.copytree(whole, out)
    with pytest.raises(InputError, match="has a tuning: give another --out, --resume"):
        tuned(out, seeds=2)
    with pytest.raises(InputError, match=r"search\.ln\.learning_rate log:1e-5:1 → log:1e-4:1"):
        tuned(out, seeds=2, search={"learning_rate": "log:1e-4:1"}, resume=True)
    with pytest.raises(InputError, match="tuning_seed 1000 → 7"):
        tuned(out, seeds=2, tuning_seed=7, resume=True)
    with pytest.raises(InputError, match="has 7 trials of a norm already: give --trials 7 or more"):
        tuned(out, seeds=2, trials=3, resume=True)
    assert said(out) == said(whole)
    # A comparison is not a tuning that can be resumed.
    other = tmp_path / "compared"
    lab.compare(valleys.train, other, norms=["ln"], goal=GOAL, device="cpu", quiet=True)
    with pytest.raises(InputError, match="holds other runs"):
        tuned(other, resume=True)
    assert (other / "results.json").exists()
    tuned(out, trials=1, force=True)
    assert len(rows_of(out)) == 2
    assert len(list((out / "trials").glob("*/result.json"))) == 2


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("optuna.db", lambda path: path.write_bytes(path.read_bytes()[:20000])),
        ("optuna.db", lambda path: path.write_text("nonsense")),
        ("optuna.db", lambda path: path.unlink()),
        ("optuna.db", lambda path: changed(path, "DELETE FROM study_directions")),
        ("optuna.db", lambda path: changed(path, "UPDATE trials SET state = 'text'")),
        ("optuna.db", lambda path: changed(path, "UPDATE trials SET datetime_start = -7")),
        ("optuna.db", lambda path: changed(path, "UPDATE trials SET trial_id = trial_id + 100")),
        ("optuna.db", lambda path: changed(path, "UPDATE trials SET number = 99 WHERE number = 1")),
        ("optuna.db", lambda path: changed(path, "DELETE FROM trial_values")),
        ("optuna.db", lambda path: changed(path, "DELETE FROM trial_params")),
        ("tuning.json", lambda path: path.write_text('{"norms": []}')),
        ("tuning.json", lambda path: path.write_text(UNSEARCHED)),
    ],
)
def test_what_is_damaged_is_named_in_one_line(
    whole: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    damage(out / name)
    with pytest.raises(InputError) as caught:
        tuned(out, seeds=2, trials=8, resume=True)
    assert re.fullmatch(
        rf"{out / name}(: norms.+;| is damaged \(.+\):) put a copy .+ --force", str(caught.value)
    )


def changed(path: Path, command: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(command)
        connection.commit()
