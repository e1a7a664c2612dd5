"""Services of a `Run` for training functions: models, weights, counts and diagnoses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lab.tests import own_training
from lab.tests.own_training import Classifier, tiny_grid
from torch import Tensor, nn

import powernorm_lab as lab
from norms.processes import run_processes
from powernorm.errors import InputError
from powernorm.records import TID
from powernorm_lab.comparing import show_comparison
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.engine.leases import Lease
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.state import random_states, set_random_states
from powernorm_lab.working import work

trained = partial(own_training.trained, norms=["bn"])


class Encoder(nn.Module):
    """Model that is built with its norm."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = norm(6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.norm(self.first(x))).square().mean()
        return loss


def test_models_with_norms_inside_begin_with_the_same_weights(tmp_path: Path) -> None:
    found: dict[str, list[Tensor]] = {}

    def function(run: Run) -> dict[str, float]:
        before = torch.get_rng_state()
        model = run.build(lambda: Encoder(run.build_norm))
        assert torch.equal(torch.get_rng_state(), before)
        found[run.norm] = [model.first.weight.detach(), model.last.weight.detach()]
        assert run.num_parameters == sum(p.numel() for p in model.parameters())
        return {"loss": float(run.penalty(num_tokens=1)) if run.norm != "rbn" else 0.0}

    trained(function, tmp_path, norms=["ln", "bn", "rbn", "pn", "adanorm"])
    torch.testing.assert_close(list(found.values()), [found["ln"]] * 5, rtol=0, atol=0)


LOSSES = (5.0, 3.0, float("nan"), 4.0, 3.5, 1.0)


def fading(run: Run, *, patience: int = 3, steps: int = 12, stop_at: int = 0) -> dict[str, Any]:
    """Train with the step as weights, and `LOSSES` as evaluations after every two steps."""
    model = run.swap(Classifier())
    run.track(model=model)
    run.evaluate_every(2, lambda: {"valid": LOSSES[run.step // 2 - 1]})
    run.keep_best("valid", patience=patience)
    for step, _ in run.steps(lambda done: iter(range(done, 100)), checkpoint_every=1):
        with torch.no_grad():
            model.first.weight.fill_(step)
        if step == stop_at and not run.is_resumed:
            raise KeyboardInterrupt
    last = float(model.first.weight.detach().mean())
    run.load("best")
    return {"loss": float(model.first.weight.detach().mean()), "last": last}


def test_the_best_weights_come_back_and_patience_ends_a_run(tmp_path: Path) -> None:
    run = trained(fading, tmp_path)["bn"]
    # The best of 5, 3, NaN, 4, 3.5 is the second, and three later ones exhaust the patience.
    assert run.metrics == {"loss": 4.0, "last": 10.0}
    assert run.scored == "best checkpoint by valid"
    assert run.message == "stopped early after step 10"
    states = lab.saved_states(str(tmp_path / "bn-seed0"))
    assert states["model"]["first.weight"].mean() == 4.0


def test_patience_that_ends_with_the_run_is_no_early_stop(tmp_path: Path) -> None:
    with mock.patch.object(fading, "__kwdefaults__", {**fading.__kwdefaults__, "steps": 10}):
        run = trained(fading, tmp_path)["bn"]
    assert (run.metrics["last"], run.message) == (10.0, "")


def test_patience_survives_an_interruption(tmp_path: Path) -> None:
    whole = trained(fading, tmp_path / "whole")["bn"]
    for at in (5, 7, 10):
        out = tmp_path / str(at)
        with mock.patch.object(fading, "__kwdefaults__", {**fading.__kwdefaults__, "stop_at": at}):
            with pytest.raises(KeyboardInterrupt):
                trained(fading, out)
            resumed = trained(fading, out, resume=True)["bn"]
        assert resumed.metrics == whole.metrics, at
        assert resumed.message == whole.message


def test_the_first_process_says_what_is_best(tmp_path: Path) -> None:
    """Processes may evaluate different rows, but all have to end at the same step."""

    def gather(value: Any) -> list[Any]:
        is_evaluation = isinstance(value, dict) and "valid" in value
        return [{"valid": -run_step(value["valid"])} if is_evaluation else value]

    def run_step(loss: float) -> float:
        return next((i for i, one in enumerate(LOSSES) if one == loss), 2)

    with mock.patch("powernorm_lab.engine.run.gather", gather):
        run = trained(fading, tmp_path)["bn"]
    assert run.metrics == {"loss": 12.0, "last": 12.0}


def test_a_checkpoint_is_kept_under_a_name(tmp_path: Path) -> None:
    def function(run: Run, *, steps: int = 9) -> dict[str, float]:
        model = run.swap(Classifier())
        run.track(model=model)
        for step, _ in run.steps([0]):
            with torch.no_grad():
                model.first.weight.fill_(step)
            if step == 4:
                run.checkpoint(keep="early")
        return {"loss": 1.0}

    trained(function, tmp_path)
    early = tmp_path / "bn-seed0/checkpoints/early.ckpt"
    assert torch.load(early, weights_only=True)["step"] == 4
    assert lab.saved_states(early)["model"]["first.weight"].mean() == 4


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([[1.0, float("nan")]] * 4, "finished"),
        ([[float("inf"), float("nan")], [1.0]], "nonfinite"),
        ([[float("nan")]], "nonfinite"),
    ],
)
def test_a_run_is_lost_where_no_loss_of_a_row_is_finite(
    tmp_path: Path, rows: list[list[float]], status: str
) -> None:
    def function(run: Run, *, steps: int = len(rows)) -> dict[str, float]:
        run.swap(Classifier())
        for step, _ in run.steps([0]):
            run.log(step, train_loss=[torch.tensor(loss) for loss in rows[step - 1]])
        return {"loss": 1.0}

    assert trained(function, tmp_path)["bn"].status == status


def test_the_speed_leaves_out_what_is_no_training(tmp_path: Path) -> None:
    def function(run: Run, *, steps: int = 30) -> dict[str, float]:
        run.track(model=run.swap(Classifier()))
        # Each reading of this clock is a second later.
        run.evaluate_every(3, lambda: [clock() for _ in range(1000)] and None)
        for _ in run.steps([0]):
            clock()
            run.count(tokens=10, rows=2)
        return {"loss": 1.0}

    clock = mock.Mock(side_effect=map(float, range(10**6)))
    with mock.patch("powernorm_lab.engine.between_steps.time.perf_counter", clock):
        run = trained(function, tmp_path)["bn"]
    # Every step reads the clock twice: in the function, and for the checkpoint.
    assert run.tokens_per_second == pytest.approx(10 / 2, rel=0.1)
    assert run.examples_per_second == pytest.approx(run.tokens_per_second / 5)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())


def test_a_run_is_diagnosed_while_it_trains(tmp_path: Path) -> None:
    def function(run: Run, *, steps: int = 7) -> dict[str, float]:
        model = run.swap(Classifier())
        run.track(model=model)
        batches = [torch.randn(16, 8) for _ in range(3)]
        run.diagnose_every(3, model, batches)
        run.diagnose_every("epoch", model, batches, epochs=lambda step: step / 5)
        for _ in run.steps(batches):
            model(batches[0]).sum().backward()
        return {"loss": 1.0}

    trained(function, tmp_path)
    found = list(_lines(tmp_path / "bn-seed0/diagnoses.jsonl"))
    assert [(line["step"], line.get("epoch")) for line in found] == [
        *((0, None), (0, 0.0), (3, None), (5, 1.0), (6, None), (7, None), (7, 1.4))
    ]
    assert all(len(line["layers"]) == 2 for line in found)


def losing(run: Run, *, by_itself: bool = False, steps: int = 5) -> dict[str, float]:
    """Train with a loss that is NaN in the second process, if any, at step 2."""
    run.track(model=run.swap(Classifier()))

    def log(step: int) -> None:
        is_lost = step > 1 and (not dist.is_initialized() or dist.get_rank() == 1)
        run.log(step, train_loss=float("nan") if is_lost else 1.0)

    if by_itself:
        for step in range(run.step + 1, steps + 1):
            log(step)
            if run.should_stop:
                run.checkpoint(step)
                break
    else:
        for step, _ in run.steps(range(100), shard=False):
            log(step)
    return {"loss": 1.0}


def lost_in_one(number: int, out: Path, by_itself: bool) -> dict[str, Any]:
    del number
    grid = tiny_grid(losing, norms=["bn"], goal={"loss": "min"}, settings={"by_itself": by_itself})
    (result,) = compare_grid(grid, out).runs
    return {"status": result.status, "message": result.message}


@pytest.mark.distributed
@pytest.mark.parametrize("by_itself", [False, True])
def test_a_loss_that_one_process_loses_ends_the_run_in_all(tmp_path: Path, by_itself: bool) -> None:
    for result in run_processes(lost_in_one, 2, tmp_path, tmp_path / "out", by_itself):
        assert result["status"] == "nonfinite"
        assert result["message"] == "the loss was NaN or infinite; stopped at step 3"


def test_a_loop_of_its_own_knows_of_a_lost_loss_from_its_checkpoint(tmp_path: Path) -> None:
    def loop(run: Run, *, steps: int = 5) -> dict[str, float]:
        run.track(model=run.swap(Classifier()))
        for step in range(run.step + 1, steps + 1):
            run.log(step, train_loss=float("nan"))
            run.checkpoint(step)
            if step == 1:
                raise KeyboardInterrupt
            if run.should_stop:
                break
        return {"loss": 1.0}

    with pytest.raises(KeyboardInterrupt):
        trained(loop, tmp_path)
    assert "stopped at step 2" in trained(loop, tmp_path, resume=True)["bn"].message


def test_processes_of_torchrun_start_no_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    grid = tiny_grid(losing, norms=["bn"], goal={"loss": "min"})
    with pytest.raises(InputError, match="leave out --jobs and --executor"):
        compare_grid(grid, tmp_path / "out", executor=mock.Mock())
    assert not (tmp_path / "out").exists()


def alone_without_a_goal(number: int, out: Path) -> str:
    def function(run: Run) -> dict[str, float]:
        run.track(model=run.swap(Classifier()))
        run.checkpoint(1)
        return {"loss": float("nan") if number else 1.0}

    grid = tiny_grid(function, norms=["bn"], goal={"loss": "min"})
    (result,) = compare_grid(grid, out).runs
    return result.status


@pytest.mark.distributed
def test_a_goal_that_one_process_lacks_leaves_nobody_waiting(tmp_path: Path) -> None:
    assert run_processes(alone_without_a_goal, 2, tmp_path, tmp_path / "out")[0] == "finished"


def test_a_discrepancy_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    def function(run: Run) -> dict[str, float]:
        run.swap(Classifier())
        values = {"mean_last": 0.1, "mean_avg": None, "var_avg": 0.1}
        run.record(tid=TID(**values, var_last=float("inf")))  # type: ignore[typeddict-item]
        return {"loss": 1.0}

    assert trained(function, tmp_path)["bn"].tid is None


def test_facts_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    class Mine(lab.Task):
        name = "mine"

        def facts(self, data: object) -> dict[str, Any]:
            return {"mean": float("nan")}

        def train(self, run: Run) -> dict[str, float]:
            raise AssertionError

    with pytest.raises(InputError, match="facts or baselines of mine cannot be stored"):
        trained(Mine, tmp_path)


def plain(run: Run) -> dict[str, float]:
    run.swap(Classifier())
    return {"loss": 1.0}


def test_a_worker_by_hand_keeps_the_statistics_of_a_comparison(tmp_path: Path) -> None:
    for seeds in (2, 3):
        lab.compare(
            plain,
            tmp_path,
            norms=["bn", "ln"],
            seeds=seeds,
            goal={"loss": "min"},
            quiet=True,
            resume=seeds == 3,
        )
        before = (tmp_path / "results.json").read_text()
        assert '"statistics"' in before
        assert work(tmp_path) == 0
        assert (tmp_path / "results.json").read_text() == before
        assert not (tmp_path / "lease.json").exists()


def test_a_comparison_waits_for_a_worker_that_writes_its_results(tmp_path: Path) -> None:
    grid = tiny_grid(plain, norms=["bn", "ln"], goal={"loss": "min"})
    compare_grid(grid, tmp_path)
    lease = Lease(tmp_path)
    threading.Timer(0.3, lease.release, kwargs={"forget": True}).start()
    show_comparison(tmp_path, table=False)
    assert '"statistics"' in (tmp_path / "results.json").read_text()


def test_generators_of_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.extend)
    set_random_states({**random_states(), "cuda": [torch.zeros(1), torch.ones(1)]})
    assert [int(state) for state in given] == [0]
