"""A race drops the best norm at most as often as stated, and needs no unnecessary runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import racing
from scipy.stats import ttest_1samp

import powernorm_lab as lab
from powernorm.errors import InputError
from powernorm_lab.engine import race as racing_rules
from powernorm_lab.engine.events import Event, Notice, RunEnded, RunStarted
from powernorm_lab.engine.executors.local import available_cores
from powernorm_lab.engine.folders import read_json
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.line import Line
from powernorm_lab.engine.race import (
    Scatter,
    Standing,
    level_of,
    lower_bound,
    shared_scatter,
    standing,
)
from powernorm_lab.runs import Goal, RunResult, Status

NORMS = ("ln", "bn", "rbn", "pn")
needs_two_cores = pytest.mark.skipif(available_cores() < 2, reason="one core")


def grid_of(
    num_seeds: int, race: lab.Race | None = None, norms: Sequence[str] = NORMS, **changes: Any
) -> Grid:
    goal = Goal(**{"metric": "loss", "direction": "min", **changes})
    return Grid(
        task=cast(Any, SimpleNamespace()),
        lines=[Line(norm, {}) for norm in norms],
        seeds=range(num_seeds),
        settings={},
        head=dict,
        config=lambda *_: {},
        line_of=lambda *_: Line("ln", {}),
        device=cast(Any, None),
        race=race or lab.Race(),
        goal=goal,
    )


def results_of(
    values: Mapping[str, Sequence[float | str]], metric: str = "loss"
) -> dict[str, RunResult]:
    """Return results by norm; a string is the status of a run without a value."""
    return {
        f"{norm}-seed{seed}": RunResult(
            norm=norm,
            seed=seed,
            status=cast(Status, value) if isinstance(value, str) else "finished",
            metrics={} if isinstance(value, str) else {metric: value},
            tid=None,
            seconds=0.0,
            tokens_per_second=None,
            parameters=None,
            folder=f"{norm}-seed{seed}",
        )
        for norm, by_seed in values.items()
        for seed, value in enumerate(by_seed)
    }


def raced(values: Mapping[str, Sequence[float | str]], num_seeds: int = 8, **race: Any) -> Standing:
    return standing(grid_of(num_seeds, lab.Race(**race), list(values)), results_of(values))


def dropped(found: Standing) -> dict[str, int]:
    return {drop["label"]: drop["after"] for drop in found.record["dropped"]}


def share_dropped(num: int, gaps: Sequence[float], confidence: float = 0.9) -> float:
    """Return how often the first norm, one of the best, is dropped in a race of ten seeds."""
    random = np.random.default_rng(0)
    grid = grid_of(10, lab.Race(confidence), NORMS)
    count = 0
    for _ in range(num):
        scatter = random.uniform(0.1, 3, size=(len(NORMS), 1))
        table = np.array(gaps)[:, None] + scatter * random.normal(size=(len(NORMS), 10))
        values = {norm: list(map(float, row)) for norm, row in zip(NORMS, table, strict=True)}
        count += NORMS[0] in dropped(standing(grid, results_of(values)))
    return count / num


def test_the_best_norm_is_dropped_as_seldom_as_asked_for() -> None:
    """10 % is allowed; the share is smaller if the variances of norms differ."""
    assert share_dropped(250, [0, 0, 0, 0]) < 0.1
    assert share_dropped(150, [0, 0.1, 0.3, 1]) < 0.1


def test_looking_after_every_seed_at_a_level_of_one_look_would_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(racing_rules, "level_of", lambda confidence, *_: 1 - confidence)
    assert share_dropped(100, [0, 0, 0, 0]) > 0.15


def test_all_looks_and_all_rivals_share_the_error() -> None:
    levels = [level_of(0.95, 4, count) for count in range(3, 10_000)]
    assert 3 * sum(levels) == pytest.approx(0.05, rel=1e-3)


def test_the_bound_is_that_of_student() -> None:
    """The pooled scatter of two norms equals that of their differences."""
    random = np.random.default_rng(0)
    table = random.normal(size=(2, 5)) + random.normal(size=5)
    values = list(map(float, table[1] - table[0]))
    expected = ttest_1samp(values, 0, alternative="greater").confidence_interval(0.98).low
    assert lower_bound(values, 0.02, shared_scatter(table)) == pytest.approx(expected)


def test_a_norm_that_scatters_more_than_the_others_is_judged_by_its_own() -> None:
    small = Scatter(1e-6, 8)
    wild, calm = ([1.0 + size * one for one in (-1, 0, 1)] for size in (1.0, 1e-5))
    assert lower_bound(wild, 0.01, small) < 0 < lower_bound(calm, 0.01, small)
    assert lower_bound(calm, 0.01, Scatter(1.0, 8)) < 0


def test_what_is_behind_for_sure_is_out_and_the_last_one_wins() -> None:
    found = raced(
        {"ln": [1.0, 2.0, 3.0], "bn": [2.0, 3.01, 4.0], "pn": [1.5, 2.51, 3.5]}, num_seeds=5
    )
    assert dropped(found) == {"bn": 3, "pn": 3}
    assert found.record["outcome"] == "one left"
    assert (found.record["leader"], found.record["left"]) == ("ln", ["ln"])
    (drop, _) = found.record["dropped"]
    assert (drop["behind"], drop["seeds"]) == ("ln", 3)
    assert drop["difference"] == pytest.approx(3.01 / 3)
    assert 0 < (drop["at_least"] or 0) < 1
    assert set(found.left_out) == {
        f"{norm}-seed{seed}" for norm in ("ln", "bn", "pn") for seed in (3, 4)
    }
    assert "behind ln" in found.left_out["bn-seed3"]


def test_two_seeds_decide_nothing_and_the_third_is_open_from_the_start() -> None:
    found = raced({"ln": [1.0, 2.0], "bn": [9.0, 10.0]})
    assert dropped(found) == {}
    assert found.record["outcome"] == "open"
    later = {f"{norm}-seed{seed}" for norm in ("ln", "bn") for seed in range(3, 8)}
    assert (found.waiting, found.left_out) == (later, {})


def test_a_seed_begins_when_the_one_before_is_complete() -> None:
    values = {"ln": [1.0, 2.0, 3.0], "bn": [1.1, 1.8, 3.1], "pn": [9.0, 10.0, 11.0]}
    found = raced(values)
    assert "ln-seed3" not in found.waiting
    assert "ln-seed4" in found.waiting
    assert "pn-seed3" in found.left_out
    assert "ln-seed3" in raced(values | {"bn": [1.1, 1.8]}).waiting


def test_more_is_better_where_the_goal_says_so() -> None:
    values = {"ln": [70.0, 71.0, 72.0], "bn": [60.0, 61.01, 62.0]}
    grid = grid_of(5, norms=list(values), direction="max")
    assert dropped(standing(grid, results_of(values))) == {"bn": 3}


def test_the_test_split_has_no_part_in_the_choice() -> None:
    values = {"ln": [1.0, 2.0, 3.0], "bn": [2.0, 3.01, 4.0]}
    grid = grid_of(5, norms=list(values), metric="test_loss")
    found = results_of(values, "valid_loss")
    for name, result in found.items():
        result.metrics["test_loss"] = 0.0 if name.startswith("bn") else 9.0
    assert standing(grid, found).record["metric"] == "valid_loss"
    assert dropped(standing(grid, found)) == {"bn": 3}


def test_norms_within_the_margin_are_level() -> None:
    values = {"ln": [1.0, 2.0, 3.0, 4.0], "bn": [1.001, 2.0, 3.001, 4.0]}
    assert raced(values).record["outcome"] == "open"
    assert raced(values, margin=0.0001).record["outcome"] == "open"
    level = raced(values, margin=0.1)
    assert (level.record["outcome"], level.record["rounds"]) == ("level", 3)
    assert level.record["left"] == ["ln", "bn"]


def test_runs_that_are_lost_put_a_norm_out_and_failed_ones_do_not() -> None:
    values = {"ln": [1.0, 2.0, 3.0], "bn": ["diverged", 2.0, "nonfinite"], "pn": ["failed"] * 3}
    found = raced(values)
    assert dropped(found) == {"bn": 3}
    assert found.record["dropped"][0]["at_least"] is None
    assert found.record["left"] == ["ln", "pn"]


def test_a_race_of_values_that_are_known() -> None:
    values: dict[str, list[float | None]] = {
        "ln": [70.0, 71.0, 72.0],
        "bn": [60.0, 61.01, 62.0],
        "pn": [None, 71.0, None],
    }
    found = lab.replay_race(values, direction="max")
    assert [(drop["label"], drop["after"]) for drop in found["dropped"]] == [("bn", 3), ("pn", 3)]
    assert found["leader"] == "ln"
    with pytest.raises(InputError, match=r"ln 3, bn 2 seeds: give at least two norms"):
        lab.replay_race({"ln": [1.0, 2.0, 3.0], "bn": [1.0, 2.0]})


@pytest.mark.parametrize("values", [{"confidence": 95}, {"confidence": 0.3}, {"margin": 0.0}])
def test_a_race_that_makes_no_sense(values: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"race with {next(iter(values))}.* such as|above 0"):
        lab.Race(**values)


def compared(out: Path, **changes: Any) -> lab.Comparison:
    chosen: dict[str, Any] = {"norms": NORMS, "seeds": 5, "goal": {"loss": "min"}}
    chosen |= {"race": lab.Race(), "num_threads": 1, "quiet": True, **changes}
    return lab.compare(racing.train, out, device="cpu", **chosen)


def said(out: Path) -> dict[str, Any]:
    """Return results.json without times and places."""
    results = read_json(out / "results.json")
    for run in results["runs"]:
        run.pop("ran_on", None)
        run["seconds"] = run["tokens_per_second"] = None
    results["settings"] = None
    return results


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    compared(out)
    return out


def test_needless_runs_are_not_trained_and_say_so(whole: Path) -> None:
    results = said(whole)
    assert results["race"] == {"confidence": 0.95, "margin": None}
    out = {drop["label"]: drop["after"] for drop in results["standing"]["dropped"]}
    assert out == {"ln": 3, "bn": 3}
    assert results["standing"]["left"] == ["rbn", "pn"]
    statuses = {(run["norm"], run["seed"]): run["status"] for run in results["runs"]}
    assert statuses["bn", 2] == statuses["rbn", 4] == "finished"
    assert statuses["bn", 3] == statuses["ln", 4] == "dropped"
    assert not (whole / "bn-seed3").exists()
    assert (
        "behind rbn"
        in next(run for run in results["runs"] if run["folder"] == "bn-seed3")["message"]
    )


def test_the_report_tells_of_the_race_and_of_no_test_that_it_makes_wrong(whole: Path) -> None:
    page = (whole / "report.html").read_text()
    text = re.sub(r"<[^>]+>", " ", page)
    assert "Out of the race after 3 seeds: ln (behind rbn by 0." in text
    assert "The race has used its 5 seeds; still in are rbn, pn." in text
    assert "4 of 20 runs were not needed" in text
    assert "did not finish" not in text
    assert "p (Holm)" not in text
    assert '<section id="race">' in page
    rows = json.loads((whole / "results.json").read_text())["statistics"]
    assert [row["seeds"] for row in rows] == [3, 3, 5, 5]
    assert all(row.get("p") is None for row in rows)


def test_a_race_that_was_interrupted_comes_to_the_same(whole: Path, tmp_path: Path) -> None:
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, RunEnded) and event.result.folder == "pn-seed3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path, on_event=listen)
    assert json.loads((tmp_path / "results.json").read_text())["standing"]["outcome"] == "open"
    events.clear()
    compared(tmp_path, on_event=events.append, resume=True)
    assert said(tmp_path) == said(whole)
    assert [event.seed for event in events if isinstance(event, RunStarted)] == [4, 4]
    assert sum(isinstance(event, Notice) for event in events) == 2


@needs_two_cores
@pytest.mark.slow
def test_a_race_of_two_at_a_time_comes_to_the_same(whole: Path, tmp_path: Path) -> None:
    compared(tmp_path, jobs=2)
    assert said(tmp_path) == said(whole)


def test_without_the_race_the_rest_is_trained(tmp_path: Path) -> None:
    compared(tmp_path, seeds=3)
    found = compared(tmp_path, seeds=4, race=None, resume=True)
    assert [run.status for run in found.runs] == ["finished"] * 16
    assert "standing" not in json.loads((tmp_path / "results.json").read_text())
    # Runs that were trained without a race can be raced: nothing is left to train.
    compared(tmp_path, seeds=4, resume=True)
    assert json.loads((tmp_path / "results.json").read_text())["standing"]["outcome"] != "open"


def test_too_few_to_race(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a race of 2 seeds can decide nothing: give at least 3"):
        compared(tmp_path, seeds=2)
    with pytest.raises(InputError, match="a race needs at least two norms"):
        compared(tmp_path, norms=["ln"])
    assert not any(tmp_path.iterdir())
