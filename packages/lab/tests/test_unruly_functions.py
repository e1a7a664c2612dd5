"""Unruly training functions: side effects do not cost a run."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import own_training
import powernorm_lab as lab
from own_training import Classifier, examples
from powernorm.errors import InputError
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.stopping import EXIT_CODE, Stop, Stopped
from powernorm_lab.engine.tasks import task_of

if TYPE_CHECKING:
    import powernorm_lab.runs as seen_by_type_checkers_only

trained = functools.partial(own_training.trained, norms=["ln"])


def status(out: Path) -> str:
    return str(json.loads((out / "ln-seed0" / "result.json").read_text())["status"])


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers of this process, which a stop replaces permanently."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# The same numbers after --resume


def epochs(x: torch.Tensor) -> Iterator[torch.Tensor]:
    while True:
        yield from x[torch.randperm(len(x))].split(len(x) // 4)


def test_batches_do_not_depend_on_what_training_draws_between_them(tmp_path: Path) -> None:
    """Otherwise the order of a generator's third pass would change after --resume."""
    check_resumed(tmp_path, lambda x, _: epochs(x))


@pytest.mark.parametrize("is_tracked", [True, False])
def test_a_loader_with_a_generator_of_its_own_goes_on_in_its_order(
    tmp_path: Path, *, is_tracked: bool
) -> None:
    def loader(x: torch.Tensor, tracked: torch.Generator) -> Any:
        own = tracked if is_tracked else torch.Generator().manual_seed(3)
        return DataLoader(x, len(x) // 4, shuffle=True, generator=own)  # type: ignore[arg-type]

    check_resumed(tmp_path, loader)


def check_resumed(out: Path, batches: Callable[[torch.Tensor, torch.Generator], Any]) -> None:
    seen: list[float] = []
    until = 0

    def function(run: Run, *, steps: int = 14) -> dict[str, float]:
        model, generator = run.swap(Classifier()), torch.Generator().manual_seed(7)
        run.track(model=model, generator=generator)
        for step, batch in run.steps(batches(examples()[0], generator), checkpoint_every=3):
            seen.append((batch.sum() + model(batch).sum()).item())
            if step == until:
                raise KeyboardInterrupt
        return {"loss": 1.0}

    trained(function, out / "whole")
    whole, seen, until = seen, [], 11
    with pytest.raises(KeyboardInterrupt):
        trained(function, out / "cut")
    seen, until = [], 0
    trained(function, out / "cut", resume=True)
    assert seen == whole[9:]


def test_gradients_that_are_being_accumulated_survive(tmp_path: Path) -> None:
    until = 0

    def function(run: Run, *, steps: int = 12) -> dict[str, float]:
        model = run.swap(Classifier())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.track(model=model, optimizer=optimizer)
        x, y = examples()
        for step, _ in run.steps([0], checkpoint_every=2):
            F.cross_entropy(model(x), y).backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if step == until:
                raise KeyboardInterrupt
        return {"loss": float(sum(p.detach().sum() for p in model.parameters()))}

    whole = trained(function, tmp_path / "whole")["ln"]
    until = 5
    with pytest.raises(KeyboardInterrupt):
        trained(function, tmp_path / "cut")
    until = 0
    assert trained(function, tmp_path / "cut", resume=True)["ln"].metrics == whole.metrics


def test_a_checkpoint_within_steps_is_written_when_its_step_is_done(tmp_path: Path) -> None:
    seen: list[int] = []
    until = 4

    def function(run: Run, *, steps: int = 6) -> dict[str, float]:
        model = run.swap(Classifier())
        run.track(model=model)
        for step, _ in run.steps([0], checkpoint_every=100):
            seen.append(step)
            with torch.no_grad():
                model.first.weight.fill_(step)
            if step == 3:
                run.checkpoint(step)
            if step == until:
                raise KeyboardInterrupt
        return {"loss": 1.0}

    with pytest.raises(KeyboardInterrupt):
        trained(function, tmp_path)
    saved = lab.saved_states(tmp_path / "ln-seed0")["model"]
    assert saved["first.weight"].unique().tolist() == [3.0]
    until = 0
    trained(function, tmp_path, resume=True)
    assert seen == [1, 2, 3, 4, 4, 5, 6]


def test_the_last_evaluation_is_made_up_for(tmp_path: Path, monkeypatch: Any) -> None:
    """For data of unknown length, the last checkpoint is older than the last evaluation."""
    evaluated: list[int] = []

    def function(run: Run) -> dict[str, float]:
        run.track(model=run.swap(Classifier()))
        run.evaluate_every(7, lambda: evaluated.append(run.step))
        for _ in run.steps(iter(range(10)), checkpoint_every=5):
            pass
        return {"loss": 1.0}

    def killed(run: Run) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_finish", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(function, tmp_path)
    trained(function, tmp_path, resume=True)
    assert evaluated == [7, 10]


@pytest.mark.parametrize(("way", "mean"), [("break", 7.0), ("average", 17.5)])
def test_what_is_saved_is_what_was_measured(tmp_path: Path, way: str, mean: float) -> None:
    """`load`, and so diagnose and fold, get the model of the table."""

    def function(run: Run, *, steps: int = 20) -> dict[str, Any]:
        model = run.swap(Classifier())
        run.track(model=model)
        if way == "average":
            run.evaluate_every(5, dict)
            run.keep_last(2)
        for step, _ in run.steps([0]):
            with torch.no_grad():
                model.first.weight.fill_(step)
            if way == "break" and step == 7:
                break
        if way == "average":
            run.load("average")
        return {"loss": model.first.weight.mean()}

    assert trained(function, tmp_path)["ln"].metrics == {"loss": mean}
    saved = lab.saved_states(tmp_path / "ln-seed0")["model"]
    assert saved["first.weight"].mean() == mean


def test_rows_survive_odd_steps_and_new_columns(tmp_path: Path) -> None:
    def function(run: Run, *, steps: int = 3) -> dict[str, float]:
        run.swap(Classifier())
        for step, _ in run.steps([0]):
            run.log(torch.tensor(step), train_loss=1.0)  # type: ignore[arg-type]
        run.log(2, late=1.0)
        return {"loss": 1.0}

    trained(function, tmp_path)
    lines = (tmp_path / "ln-seed0" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "1", "2", "3", "2"]
    with pytest.raises(InputError, match=r"the step 2\.5, expected a whole number"):
        trained(lambda run: run.log(2.5), tmp_path / "half")


# Signals


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)]
)
@pytest.mark.parametrize("after", ["return", "fail"])
@pytest.mark.usefixtures("handlers")
def test_a_signal_that_the_function_swallows_ends_the_run_all_the_same(
    tmp_path: Path, number: int, expected: type[BaseException], after: str
) -> None:
    """Otherwise half a training would count as finished or failed, and the next run would begin."""

    def function(run: Run, *, steps: int = 3) -> dict[str, float]:
        run.swap(Classifier())
        with suppress(BaseException):
            kill(number)
        if after == "fail":
            raise RuntimeError("a worker was lost")
        return {"loss": 1.0}

    with pytest.raises(expected):
        trained(function, tmp_path)
    assert status(tmp_path) == "interrupted"


@pytest.mark.usefixtures("handlers")
def test_a_failure_after_a_signal_is_no_failure_of_the_run(tmp_path: Path) -> None:
    """A signal to all processes of a job ends the workers of a loader, which then raises."""

    def function(run: Run, *, steps: int = 3) -> dict[str, float]:
        run.track(model=run.swap(Classifier()))
        for _ in run.steps([0]):
            kill(signal.SIGTERM)
            raise RuntimeError("a worker was lost")
        return {"loss": 1.0}

    with pytest.raises(Stopped):
        trained(function, tmp_path)
    assert status(tmp_path) == "interrupted"


@pytest.mark.usefixtures("handlers")
def test_signals_that_a_function_took_are_taken_back_for_the_next_run(tmp_path: Path) -> None:
    def function(run: Run, *, steps: int = 3) -> dict[str, float]:
        run.track(model=run.swap(Classifier()))
        if run.norm == "ln":
            signal.signal(signal.SIGTERM, lambda *_: None)
        for step, _ in run.steps([0]):
            if run.norm == "bn" and step == 2:
                kill(signal.SIGTERM)
        return {"loss": 1.0}

    with pytest.raises(Stopped):
        trained(function, tmp_path, norms=["ln", "bn"])
    assert status(tmp_path) == "finished"


@pytest.mark.usefixtures("handlers")
def test_no_run_begins_after_a_signal(tmp_path: Path) -> None:
    begun: list[str] = []

    def function(run: Run, *, steps: int = 3) -> dict[str, float]:
        begun.append(run.norm)
        run.swap(Classifier())
        assert not run.should_stop  # which lets signals wait
        kill(signal.SIGTERM)
        return {"loss": 1.0}

    with pytest.raises(Stopped):
        trained(function, tmp_path, norms=["ln", "bn"])
    assert begun == ["ln"]
    assert status(tmp_path) == "finished"


@pytest.mark.usefixtures("handlers")
def test_a_second_signal_costs_neither_the_exit_code_nor_the_result() -> None:
    stop = Stop()
    with pytest.raises(SystemExit) as raised, stop.watching():
        kill(signal.SIGTERM)
    assert raised.value.code == EXIT_CODE
    kill(signal.SIGTERM)


def sleeps(begun: Any) -> None:
    begun.set()
    while True:
        time.sleep(0.1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_can_be_terminated(tmp_path: Path) -> None:
    """A pool that is closed within a step ends its processes by SIGTERM and waits for them."""
    codes: list[int | None] = []

    def function(run: Run, *, steps: int = 1) -> dict[str, float]:
        run.swap(Classifier())
        for _ in run.steps([0]):
            context = multiprocessing.get_context("fork")
            begun = context.Event()
            child = context.Process(target=sleeps, args=(begun,))
            child.start()
            begun.wait(20)
            child.terminate()
            child.join(20)
            codes.append(child.exitcode)
            child.kill()
        return {"loss": 1.0}

    trained(function, tmp_path)
    assert codes == [-signal.SIGTERM]


def test_a_function_that_exits_costs_no_other_run(tmp_path: Path) -> None:
    def function(run: Run) -> dict[str, float]:
        run.swap(Classifier())
        if run.norm == "ln":
            sys.exit(0)
        return {"loss": 1.0}

    found = trained(function, tmp_path, norms=["ln", "bn"])
    assert {norm: run.status for norm, run in found.items()} == {
        "ln": "failed",
        "bn": "finished",
    }


# The process is as it was for the next run


def test_what_a_run_changes_in_the_process_ends_with_it(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    found = []

    def function(run: Run, *, steps: int = 2, sizes: list[int] = [1]) -> dict[str, float]:
        found.append(
            (
                Path.cwd(),
                torch.get_default_dtype(),
                torch.get_num_threads(),
                torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(),
                list(sizes),
            )
        )
        os.chdir("elsewhere")
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        sizes.append(2)
        run.settings["steps"] = 7
        run.track(model=run.swap(Classifier()))
        for step, _ in run.steps([0]):
            run.log(step, train_loss=1.0)
        return {"loss": 1.0}

    trained(function, Path("runs"), norms=["ln", "bn"])
    assert found[0] == found[1]
    assert not list((tmp_path / "elsewhere").iterdir())
    config = json.loads((tmp_path / "runs" / "bn-seed0" / "config.json").read_text())
    assert config["settings"] == {"steps": 2, "sizes": [1]}


# What is a function


def annotated(run: seen_by_type_checkers_only.RunResult, *, rate: float = 1.0) -> dict[str, float]:
    return {"loss": rate}


class Trainer:
    def __call__(self, run: Run, *, rate: float = 1.0) -> dict[str, float]:
        return {"loss": rate}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (annotated, "annotated"),
        (functools.partial(annotated, rate=2.0), "annotated"),
        (Trainer(), "Trainer"),
    ],
)
def test_any_callable_has_its_name_file_and_settings(function: Any, name: str) -> None:
    task = task_of(function)
    assert task.name == f"{__name__}:{name}"
    assert task.source()["file"] == Path(__file__).name
    assert task.settings({"rate": "0.5"}) == {"rate": 0.5}
    with pytest.raises(InputError, match="rate=nan cannot be stored"):
        task.settings({"rate": "nan"})


def test_a_type_that_is_not_there_at_run_time_is_named() -> None:
    def function(
        run: Run, *, result: seen_by_type_checkers_only.RunResult | None = None
    ) -> dict[str, float]:
        return {"loss": 1.0}

    with pytest.raises(InputError, match=r"result of .* has the type seen_by.*run time"):
        task_of(function)


def test_a_number_for_the_batches_is_answered_with_what_is_meant(tmp_path: Path) -> None:
    def train(run: Run) -> dict[str, float]:
        run.build_norm(4)
        for _ in run.steps(100):  # type: ignore[call-overload]
            pass
        return {"loss": 0.0}

    with pytest.raises(InputError, match=r"steps got 100, expected batches: give a DataLoader"):
        trained(train, tmp_path)
