"""Comparisons of users' training functions, from settings to results."""

from __future__ import annotations

import hashlib
import json
import linecache
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import own_training
import powernorm
import powernorm_lab as lab
from own_training import Classifier, examples, run_folders, tiny_grid, train
from powernorm.errors import InputError
from powernorm_lab.engine.events import Event, Notice, RunStarted, StepsDone
from powernorm_lab.engine.folders import read_json, write_json
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.stopping import Stopped
from powernorm_lab.engine.tasks import FunctionTask, Task, task_of
from powernorm_lab.own_grid import checked_seeds
from powernorm_lab.runs import Baseline

GOAL: dict[str, Literal["min", "max"]] = {"accuracy": "max"}


trained = partial(own_training.trained, norms=["pn"])


def without_times(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    place = lines[0].split(",").index("seconds")
    return [",".join(c for i, c in enumerate(line.split(",")) if i != place) for line in lines]


def test_a_function_is_compared_like_a_built_in_task(tmp_path: Path, capsys: Any) -> None:
    found = lab.compare(
        train, tmp_path, norms=["ln", "bn", "rbn", "pn"], seeds=2, goal=GOAL, device="cpu"
    )
    shown = capsys.readouterr()
    assert [(run.norm, run.seed) for run in found.runs] == [
        (norm, seed) for norm in ("ln", "bn", "rbn", "pn") for seed in (0, 1)
    ]
    assert all(0.4 < run.metrics["accuracy"] <= 1 for run in found.runs)  # type: ignore[operator]
    assert "gap to ln" in shown.out
    assert "2 finished" in shown.out
    assert "[1/8] ln seed 0: 20 steps" in shown.err
    assert (tmp_path / "report.html").stat().st_size > 10_000
    head = read_json(tmp_path / "comparison.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert {key: results[key] for key in head} == head
    assert head["format"] == 2
    assert head["goal"] == {"metric": "accuracy", "direction": "max"}
    assert head["settings"]["learning_rate"] == 0.01
    names = {path.name for path in (tmp_path / "pn-seed1").iterdir()}
    assert names == {"config.json", "metrics.csv", "norms.csv", "result.json", "checkpoints"}
    rows = (tmp_path / "pn-seed1" / "norms.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:3]] == ["norm", "norm2"]


def test_all_norms_of_a_seed_begin_alike_and_see_the_same_batches(tmp_path: Path) -> None:
    seen: dict[tuple[str, int], list[Any]] = {}

    def watch(run: Run, *, steps: int = 3) -> dict[str, float]:
        model = run.swap(Classifier())
        x, _ = examples()
        drawn = [p.detach().clone() for p in model.parameters()]
        order = [b.sum() for _, (b,) in run.steps(_loader(x))]
        noise = [torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        seen[run.norm, run.seed] = [*drawn, *order, *noise]
        return {"loss": 0.0}

    trained(watch, tmp_path, norms=["ln", "rbn", "pn"], seeds=[0, 1])
    for seed in (0, 1):
        for norm in ("rbn", "pn"):
            torch.testing.assert_close(seen[norm, seed], seen["ln", seed], rtol=0, atol=0)
    assert not torch.equal(seen["ln", 0][0], seen["ln", 1][0])


def _loader(x: Tensor) -> torch.utils.data.DataLoader[Any]:
    data = torch.utils.data.TensorDataset(x)
    return torch.utils.data.DataLoader(data, batch_size=50, shuffle=True)


def test_the_callers_generators_are_as_before(tmp_path: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    trained(train, tmp_path, goal=GOAL)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Interrupting:
    """Stop the process in some way after a step of a run."""

    def __init__(self, step: int, way: Callable[[], None]) -> None:
        self.step, self.way = step, way

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepsDone) and event.step == self.step:
            self.way()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("way", "kept"),
    [
        (interrupt, 12),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 14),
        (lambda: os.kill(os.getpid(), signal.SIGUSR1), 14),
    ],
)
@pytest.mark.parametrize("norm", ["rbn", "pn"])
def test_an_interrupted_run_comes_to_the_same_end(
    tmp_path: Path, norm: str, way: Callable[[], None], kept: int
) -> None:
    """Ctrl-C costs the steps since the last checkpoint; a scheduler's signal none."""
    whole = trained(train, tmp_path / "whole", norms=[norm], goal=GOAL)[norm]
    with pytest.raises((KeyboardInterrupt, Stopped)):
        trained(train, tmp_path / "cut", norms=[norm], goal=GOAL, on_event=Interrupting(14, way))
    (folder,) = run_folders(tmp_path / "cut")
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "interrupted"
    assert "--resume" in result["message"]
    started: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, RunStarted):
            started.append(event.first_step)

    resumed = trained(
        train, tmp_path / "cut", norms=[norm], goal=GOAL, resume=True, on_event=watch
    )[norm]
    assert started == [kept]
    assert resumed.metrics == whole.metrics
    assert resumed.scored == "average of the last 2 checkpoints"
    for log in ("metrics.csv", "norms.csv"):
        one, other = (tmp_path / name / folder.name / log for name in ("whole", "cut"))
        if log == "metrics.csv":
            assert without_times(one) == without_times(other)
        else:
            assert one.read_text() == other.read_text()


class Stretches:
    """Batches with a state, like torchdata's StatefulDataLoader."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.position = x, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 10:
            self.position += 1
            yield self.x[self.position : self.position + 9]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def endless(x: Tensor) -> Iterator[Tensor]:
    while True:
        yield x[torch.randint(len(x), (20,))]


BATCHES: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
    "a generator": (endless, 13, 7),
    "a list": (lambda x: list(x.split(25)), 13, 7),
    "shuffled": (lambda x: _loader(x[:175]), 13, 7),
    "stateful": (Stretches, 13, 7),
    "one pass": (lambda x: _loader(x[:175]), 4, 3),
}
"""Batches by kind, with the number of steps and the one at which the run is interrupted."""


@pytest.mark.parametrize("kind", BATCHES)
def test_a_run_goes_on_at_its_place_in_any_batches(tmp_path: Path, kind: str) -> None:
    make, num_steps, stop = BATCHES[kind]
    seen: list[float] = []
    until = 100

    def watch(run: Run) -> dict[str, float]:
        model = run.swap(Classifier())
        run.track(model=model)
        run.num_steps = None if kind == "one pass" else num_steps
        for step, batch in run.steps(make(examples()[0]), checkpoint_every=2):
            first = batch[0] if isinstance(batch, list) else batch
            seen.append((first.sum() + model(first).sum()).item())
            if step == until:
                raise KeyboardInterrupt
        return {"loss": sum(seen)}

    trained(watch, tmp_path / "whole")
    whole, seen, until = seen, [], stop
    assert len(whole) == num_steps
    with pytest.raises(KeyboardInterrupt):
        trained(watch, tmp_path / "cut")
    assert seen == whole[:stop]
    seen, until = [], 100
    trained(watch, tmp_path / "cut", resume=True)
    assert seen == whole[(stop - 1) // 2 * 2 :]


def test_what_was_not_tracked_begins_anew_and_says_so(tmp_path: Path) -> None:
    calls: list[int] = []

    def untracked(run: Run, *, steps: int = 4) -> dict[str, float]:
        run.swap(Classifier())
        for step, _ in run.steps([0]):
            run.log(step, train_loss=1.0)
            if step == 3 and not calls:
                calls.append(step)
                raise KeyboardInterrupt
        return {"loss": 1.0}

    told: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Notice):
            told.append(event.message)

    with pytest.raises(KeyboardInterrupt):
        trained(untracked, tmp_path)
    assert trained(untracked, tmp_path, resume=True, on_event=listen)["pn"].status == "finished"
    assert told == ["pn-seed0 has no checkpoint yet and restarts"]
    assert len((tmp_path / "pn-seed0" / "metrics.csv").read_text().splitlines()) == 5


def test_a_changed_file_is_told_when_going_on(tmp_path: Path) -> None:
    told: list[Event] = []
    trained(train, tmp_path, goal=GOAL)
    trained(train, tmp_path, goal=GOAL, resume=True, on_event=told.append)
    assert not any(isinstance(event, Notice) for event in told)
    config = tmp_path / "pn-seed0" / "config.json"
    values = read_json(config)
    values["function"]["sha256"] = "0" * 64
    write_json(config, values)
    trained(train, tmp_path, goal=GOAL, resume=True, on_event=told.append)
    (notice,) = [event.message for event in told if isinstance(event, Notice)]
    assert "own_training.py has changed" in notice


def test_a_function_that_changed_in_a_notebook_is_told_when_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_cell(number: int, loss: float) -> Callable[[Run], Any]:
        text = f"def train(run):\n    return {{'loss': {loss}, 'norm': len(run.norm)}}\n"
        cell = f"<ipython-input-{number}>"
        monkeypatch.setitem(linecache.cache, cell, (len(text), None, text.splitlines(True), cell))
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, cell, "exec"), names)
        function: Callable[[Run], Any] = names["train"]
        return function

    told: list[Event] = []
    trained(in_cell(1, 1.0), tmp_path, goal={"loss": "min"})
    assert read_json(tmp_path / "comparison.json")["function"]["file"] is None
    trained(in_cell(2, 1.0), tmp_path, goal={"loss": "min"}, resume=True, on_event=told.append)
    assert not any(isinstance(event, Notice) for event in told)
    trained(in_cell(3, 2.0), tmp_path, goal={"loss": "min"}, resume=True, on_event=told.append)
    (notice,) = [event.message for event in told if isinstance(event, Notice)]
    assert "__main__:train has changed" in notice


def test_a_file_that_changes_in_the_middle_is_the_one_that_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "changing_function.py"
    file.write_text(
        "from pathlib import Path\n"
        "def train(run):\n"
        "    with Path(__file__).open('a') as file:\n"
        "        file.write(f'# {run.norm}')\n"
        "    return {'loss': 1.0}\n"
    )
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    trained("changing_function:train", out, norms=["ln", "bn"], goal={"loss": "min"})
    for name in ("ln-seed0/config.json", "bn-seed0/config.json", "comparison.json"):
        record = read_json(out / name)
        assert record.get("function", record)["sha256"] == digest


def test_other_settings_are_refused_when_going_on(tmp_path: Path) -> None:
    trained(train, tmp_path, goal=GOAL)
    with pytest.raises(InputError, match=r"settings.learning_rate 0.01 → 0.1"):
        trained(train, tmp_path, goal=GOAL, settings={"learning_rate": "0.1"}, resume=True)


def test_one_run_that_breaks_does_not_cost_the_others(tmp_path: Path) -> None:
    def breaks(run: Run, *, steps: int = 2) -> dict[str, float]:
        run.swap(Classifier())
        if run.norm == "bn":
            raise RuntimeError("out of luck")
        return {"loss": 1.0}

    found = trained(breaks, tmp_path, norms=["ln", "bn", "pn"])
    assert [found[norm].status for norm in ("ln", "bn", "pn")] == [
        "finished",
        "failed",
        "finished",
    ]
    assert found["bn"].message == "RuntimeError: out of luck"


def test_a_missing_file_of_the_function_is_told_as_such(tmp_path: Path) -> None:
    """The error is not that of a folder that cannot be written."""

    def reads(run: Run) -> dict[str, float]:
        run.build_norm(4)
        return {"loss": float(Path("nowhere.csv").read_text())}

    result = trained(reads, tmp_path)["pn"]
    assert result.status == "failed"
    assert "nowhere.csv" in result.message


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_lost_loss_ends_a_run_as_nonfinite(tmp_path: Path, number: float) -> None:
    seen: list[int] = []

    def loses(run: Run, *, steps: int = 50) -> dict[str, float]:
        model = run.swap(Classifier())
        run.track(model=model)
        for step, _ in run.steps([0]):
            seen.append(step)
            single = step == 3  # a step that a GradScaler skips
            run.log(step, train_loss=number if single or step > 9 else 1.0)
        return {"loss": 0.5}

    result = trained(loses, tmp_path)["pn"]
    assert result.status == "nonfinite"
    assert "stopped at step 11" in result.message
    assert seen[-1] == 11


def test_a_goal_that_is_no_number_is_nonfinite(tmp_path: Path) -> None:
    def loses(run: Run) -> dict[str, float]:
        run.swap(Classifier())
        return {"loss": math.nan, "other": 1.0}

    result = trained(loses, tmp_path)["pn"]
    assert (result.status, result.metrics) == ("nonfinite", {"loss": None, "other": 1.0})


def test_a_task_with_baselines_diverges_above_them(tmp_path: Path) -> None:
    class Guessing(Task):
        name = "guessing"

        def prepare(self, settings: Any) -> list[float]:
            return [1.0, 2.0]

        def fingerprint(self, data: Any) -> str:
            return f"{data}"

        def baselines(self, data: list[float], settings: Any) -> list[Baseline]:
            return [Baseline(name="mean", metrics={"loss": sum(data) / len(data)})]

        def facts(self, data: list[float]) -> dict[str, Any]:
            return {"name": "numbers", "num_train": len(data)}

        def check(self, settings: Any, norm: str) -> None:
            if norm == "none":
                raise InputError("guessing cannot do without a norm")

        def train(self, run: Run) -> dict[str, float]:
            run.build_norm(4)
            return {"loss": run.data[1] if run.norm == "bn" else run.data[0]}

    found = trained(Guessing(), tmp_path, norms=["ln", "bn"])
    assert found["ln"].status == "finished"
    assert found["bn"].status == "diverged"
    assert "mean" in found["bn"].message
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["baselines"] == [{"name": "mean", "metrics": {"loss": 1.5}}]
    assert results["data"] == {"name": "numbers", "num_train": 2}
    with pytest.raises(InputError, match="cannot do without"):
        trained(Guessing, tmp_path / "none", norms=["none"])
    with pytest.raises(InputError, match="does not define how to load its model"):
        Guessing().load(tmp_path / "ln-seed0")


def test_the_warm_up_is_a_fraction_of_the_run_unless_chosen(tmp_path: Path) -> None:
    found: dict[str, int] = {}

    def look(run: Run, *, steps: int = 200) -> dict[str, float]:
        norm = run.build_norm(8)
        found[run.norm] = getattr(norm, "warmup_steps", 0)
        return {"loss": 1.0}

    trained(look, tmp_path / "a", norms=["pn", "brn", "mabn", "ln"])
    assert found == {"pn": 20, "brn": 20, "mabn": 20, "ln": 0}
    trained(look, tmp_path / "b", norms=["pn"], norm_options={"pn": {"warmup_steps": 7}})
    assert found["pn"] == 7


def test_penalty_is_that_of_all_that_was_built(tmp_path: Path) -> None:
    def look(run: Run) -> dict[str, float]:
        model = run.swap(Classifier())
        norm = run.build_norm(8)
        x, _ = examples()
        model(x)
        norm(x)
        both = run.penalty(num_tokens=len(x))
        # A second forward, because reading the penalty consumes that of the first.
        model.train()
        norm.train()
        model(x)
        norm(x)
        alone = powernorm.penalty(model, num_tokens=len(x)) + powernorm.penalty(
            norm, num_tokens=len(x)
        )
        torch.testing.assert_close(both, alone)
        return {"loss": float(both)}

    found = trained(look, tmp_path, norms=["rbn", "ln"])
    assert found["rbn"].metrics["loss"] > 0  # type: ignore[operator]
    assert found["ln"].metrics["loss"] == 0


def test_loops_of_other_libraries_stop_and_resume(tmp_path: Path) -> None:
    """They use `should_stop`, `checkpoint` and `step` instead of `steps`."""

    def loop(run: Run, *, signal_at: int = 0, steps: int = 9) -> dict[str, float]:
        model = run.swap(Classifier())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.track(model=model, optimizer=optimizer)
        x, y = examples()
        for step in range(run.step + 1, steps + 1):
            rows = torch.randint(len(x), (16,))
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5 and not (tmp_path / "sent").exists() and tmp_path.name in str(run.folder):
                (tmp_path / "sent").touch()
                os.kill(os.getpid(), signal.SIGTERM)
            if run.should_stop:
                run.checkpoint(step)
                return {}
        return {"loss": sum(p.detach().double().sum().item() for p in model.parameters())}

    (tmp_path / "sent").touch()
    whole = trained(loop, tmp_path / "whole")["pn"]
    (tmp_path / "sent").unlink()
    with pytest.raises(Stopped):
        trained(loop, tmp_path / "cut")
    assert (
        json.loads((tmp_path / "cut/pn-seed0/result.json").read_text())["status"] == "interrupted"
    )
    assert trained(loop, tmp_path / "cut", resume=True)["pn"].metrics == whole.metrics


def evaluated(run: Run) -> None:
    """Train for two steps with an evaluation after each, whose value is `valid_loss`."""
    run.track(model=run.swap(Classifier()))
    run.evaluate_every(1, lambda: {"valid_loss": 1.0})
    for _ in run.steps([1, 2]):
        pass


WRONG: list[tuple[Callable[[Run], Any], str]] = [
    (lambda run: run.track(model=3), r"run\.track\(model=…\) got a int"),
    (lambda run: run.penalty(), "before run.swap or run.build_norm"),
    (lambda run: run.monitor(), "before run.swap or run.build_norm"),
    (lambda run: run.checkpoint(), "nothing to save"),
    (lambda run: list(run.steps([1])), "neither run.swap nor run.build_norm"),
    (lambda run: run.evaluate_every(0, dict), "expected at least 1"),
    (lambda run: (run.norm, run.keep_last(2), *run.steps([1])), "run.evaluate_every before"),
    (
        lambda run: (
            run.norm,
            run.evaluate_every(1, dict),
            run.keep_best("loss"),
            *run.steps([1]),
        ),
        "call run.track and",
    ),
    (lambda run: run.keep_best("loss", "up"), "got 'up', expected min or max"),  # type: ignore[arg-type]
    (
        lambda run: (run.keep_best("valid_los"), evaluated(run)),
        r"keep_best\('valid_los'\) found no",
    ),
    (lambda run: run.load("worst"), "got 'worst', expected best, last or average"),  # type: ignore[arg-type]
    (lambda run: run.build(lambda: None), "got a NoneType, expected a module: return the"),  # type: ignore[type-var,arg-type,return-value]
    (lambda run: (run.norm, run.keep_best("loss"), *run.steps([1])), "run.evaluate_every before"),
    (lambda run: run.keep_last(0), "expected at least 1"),
    (lambda run: run.keep_best("loss", patience=0), "expected at least 1"),
    (lambda run: run.load("best"), r"best\.ckpt does not exist"),
    (lambda run: run.load("average"), "call run.keep_last first"),
    (lambda run: run.build(Classifier), "without the run's norm"),
    (lambda run: run.diagnose_every(0, Classifier(), []), "expected at least 1"),
    (lambda run: run.diagnose_every("epoch", Classifier(), []), "needs epochs"),
    (lambda run: run.path("../other"), "outside the run's folder or reserved"),
    (lambda run: run.path("checkpoints/mine"), "outside the run's folder or reserved"),
    (lambda run: run.path("result.json"), "outside the run's folder or reserved"),
    (lambda run: run.path("lease.json"), "outside the run's folder or reserved"),
    (lambda run: run.record(remark=3), "remark=3, expected text"),  # type: ignore[arg-type]
    (lambda run: run.record(signatures={"bleu": 3}), "bleu=3, expected text"),  # type: ignore[dict-item]
    (lambda run: run.record(status="failed"), "expected finished, diverged, nonfinite"),
    (lambda run: run.log(1, train_loss="low"), "expected a number"),  # type: ignore[arg-type]
    (lambda run: run.log(1, **{"a,b": 1.0}), "give it another name"),
    (lambda run: run.log(1, step=1.0), "give it another name"),
    (lambda run: run.record(status="finished") or {"loss": 1.0}, "neither run.swap nor"),
    (lambda run: None, "neither run.swap nor run.build_norm|expected a dict of metrics"),
    (lambda run: run.norm and {"other": 1.0}, "returned no 'loss', which is the goal"),
    (lambda run: run.norm and {"loss": "low"}, "loss='low', expected a number"),
    (lambda run: run.norm and [1.0], "expected a dict of metrics"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_use_of_a_run_is_one_clear_error(
    tmp_path: Path, wrong: Callable[[Run], Any], message: str
) -> None:
    def function(run: Run) -> Any:
        return wrong(run)

    with pytest.raises(InputError, match=message):
        trained(function, tmp_path)
    assert not list(tmp_path.glob("*/result.json"))


def test_batches_that_end_too_early_are_named(tmp_path: Path) -> None:
    def function(run: Run, *, steps: int = 5) -> dict[str, float]:
        run.swap(Classifier())
        for _ in run.steps(iter([1, 2, 3])):
            pass
        return {"loss": 1.0}

    with pytest.raises(InputError, match="ended after 3 of 5 steps"):
        trained(function, tmp_path)


def test_tracking_other_things_than_before_is_named(tmp_path: Path) -> None:
    def function(run: Run, *, steps: int = 5) -> dict[str, float]:
        model = run.swap(Classifier(16 if not torn else torn.get("width", 16)))
        things = {"model": model} if not torn.get("more") else {"model": model, "more": model}
        run.track(**{} if torn.get("less") else things)
        for step, _ in run.steps([0], checkpoint_every=1):
            if step == 2 and not torn:
                raise KeyboardInterrupt
        return {"loss": 1.0}

    torn: dict[str, int] = {}
    with pytest.raises(KeyboardInterrupt):
        trained(function, tmp_path)
    for change, message in (
        ({"width": 8}, "'model' cannot load its state"),
        ({"more": 1}, "no 'more'"),
        ({"less": 1}, "also holds model"),
    ):
        torn = change
        with pytest.raises(InputError, match=message):
            trained(function, tmp_path, resume=True)
    torn = {"width": 16}
    assert trained(function, tmp_path, resume=True)["pn"].status == "finished"


def test_a_state_that_a_checkpoint_could_not_give_back_is_refused_at_once(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"values": [1, Path("x")]}

        def load_state_dict(self, state: Any) -> None: ...

    def function(run: Run, *, steps: int = 2) -> dict[str, float]:
        run.swap(Classifier())
        run.track(odd=Odd())
        for _ in run.steps([0], checkpoint_every=1):
            pass
        return {"loss": 1.0}

    with pytest.raises(InputError, match=r"odd\['values'\]\[1\] is a pathlib"):
        trained(function, tmp_path)


SIGNATURES: list[tuple[Any, str]] = [
    (dict, "no function of a run|takes no run"),
    (lambda: {"loss": 1.0}, "takes no run"),
    (lambda *, steps=1: {}, "takes no run"),
    (lambda run, width: {}, r"the setting width, .* define def train\(run, \*, width=…\)"),
    (lambda run, width=3, /: {}, "the setting width, which is no keyword"),
    (lambda run, **options: {}, "name each setting"),
    (lambda run, *, norms=(): {}, "give it another name"),
    (lambda run, *, where=object(): {}, "cannot be stored"),
    (lambda run, *, rate=math.nan: {}, "cannot be stored"),
    (3, "expected a function or a Task"),
]


@pytest.mark.parametrize(("function", "message"), SIGNATURES)
def test_a_function_that_cannot_be_compared_is_refused(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        task_of(function)


def test_settings_are_read_as_the_types_of_their_parameters() -> None:
    def function(
        run: Run,
        *,
        rate: float = 1e-3,
        steps: int = 10,
        fast: bool = False,
        kind: Literal["a", "b"] = "a",
        sizes: tuple[int, ...] = (1, 2),
        limit: int | None = 3,
        json: str = "x",
        bits: Literal[8, 16] = 8,
        depth: int | str = 2,
        clip: Any = None,
        betas: tuple[float, float] = (0.9, 0.999),
        names: list[str] | None = None,
        widths: list[Any] | None = None,
    ) -> dict[str, float]:
        return {}

    task = FunctionTask(function)
    texts = {
        "rate": "3e-4",
        "steps": "20",
        "fast": "true",
        "kind": "b",
        "sizes": "[3, 4]",
        "limit": "none",
        "json": "[",
        "bits": "16",
        "depth": "3",
        "clip": "0.5",
        "betas": "0.8, 0.9",
        "names": "1,b",
        "widths": "4,5",
    }
    assert task.settings(texts) == {
        "rate": 3e-4,
        "steps": 20,
        "fast": True,
        "kind": "b",
        "sizes": (3, 4),
        "limit": None,
        "json": "[",
        "bits": 16,
        "depth": 3,
        "clip": 0.5,
        "betas": (0.8, 0.9),
        "names": ["1", "b"],
        "widths": [4, 5],
    }
    for text in ("3", '"3"', "[3]", "3,4", "true"):
        assert task.settings({"json": text})["json"] == text
    assert task.to_json(task.settings({}))["sizes"] == [1, 2]
    assert task.num_steps(task.settings(texts)) == 20
    for wrong, message in (
        ({"rate": "fast"}, "rate=fast: input should be a valid number"),
        ({"steps": "2.5"}, "steps=2.5"),
        ({"kind": "c"}, "'a' or 'b'"),
        ({"bits": "32"}, "bits=32: input should be 8 or 16"),
        ({"betas": "0.8"}, "betas=0.8: input should be a valid tuple"),
        ({"step": "3"}, "did you mean steps"),
    ):
        with pytest.raises(InputError, match=message):
            task.settings(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"goal": {}}, "name the metric of"),
        ({"goal": {"accuracy": "up"}}, "expected min or max"),
        ({"norms": ["layernorm"]}, "layernorm"),
        ({"norm_options": {"gs": {}}}, "not among the norms"),
        ({"norm_options": {"pn": {"speed": 1}}}, "speed"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"settings": {"width": 3}}, "'width' is not a setting"),
    ],
)
def test_a_wrong_comparison_is_refused_before_anything_is_trained(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        tiny_grid(train, **changes)


@pytest.mark.parametrize("seeds", [0, -1, [], [1, 1], [-1], "3", ["3"], 2.0, [0.5], [2**63]])
def test_wrong_seeds_are_refused(tmp_path: Path, seeds: Any) -> None:
    with pytest.raises(InputError, match=r"seeds is .*: give a number of seeds"):
        lab.compare(train, tmp_path, seeds=seeds, goal=GOAL)


def test_seeds_of_numpy_are_whole_numbers() -> None:
    seeds = checked_seeds(np.arange(2))
    assert (seeds, [type(seed) for seed in seeds]) == ([0, 1], [int, int])


def test_a_recipe_has_settings_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="goal is part of a recipe"):
        lab.compare(lab.recipe("lm", "smoke"), tmp_path, goal=GOAL)
