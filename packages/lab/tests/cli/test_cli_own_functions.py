"""`powernorm compare my_module:train`, and other commands on its runs."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from lab.tests.stopped_commands import stopped, wait_until

from commands import SECONDS, Outcome, powernorm, refusal, start
from covering import some_default

MODULE = """
import time
import torch
from torch import nn
import powernorm_lab as lab
from powernorm import InputError

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()


def build(norm):
    return nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 2))


def train(run, *, learning_rate: float = 1e-2, steps: int = 6, seconds: float = 0.0):
    model = build(run.build_norm(8)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    run.track(model=model, optimizer=optimizer)
    for step, _ in run.steps([0]):
        loss = nn.functional.cross_entropy(model(x), y)
        (loss + run.penalty(num_tokens=len(x))).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(step, train_loss=loss)
        time.sleep(seconds)
    return {"accuracy": (model(x).argmax(-1) == y).double().mean(), "loss": loss}


def shared(run, *, steps: int = 6, wrap: bool = True, shard: bool = True, rows: int = 16):
    model = build(run.build_norm(8)).to(run.device)
    called = run.wrap(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.track(model=model, optimizer=optimizer)
    batches = [{"x": x[i : i + rows], "y": y[i : i + rows]} for i in range(0, 64, rows)]
    for step, batch in run.steps(batches, shard=shard):
        loss = nn.functional.cross_entropy(called(batch["x"]), batch["y"])
        (loss + run.penalty(num_tokens=len(batch["x"]))).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(step, train_loss=loss)
    loss = nn.functional.cross_entropy(model.eval()(x), y)
    return {"loss": loss, "rows": torch.tensor(float(len(batch["x"])))}


def talking(run, *, steps: int = 2):
    print("the function says something")
    return train(run, steps=steps)


class Loading(lab.Task):
    def train(self, run, *, steps: int = 6):
        return train(run, steps=steps)

    def load(self, folder):
        import json
        from powernorm import build_norm
        config = json.loads((folder / "config.json").read_text())
        model = build(build_norm(config["norm"], 8, **config["norm_options"]))
        model.load_state_dict(lab.saved_states(folder)["model"])
        return model, [x[:32], x[32:]]


def named():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), [x[:32], x[32:]]


def failing(run):
    if run.norm != "ln":
        raise RuntimeError("boom")
    return {"accuracy": 1.0}


def broken():
    raise RuntimeError("no such weights")
"""
COMMAND = ("compare", "mine:train", "--goal", "accuracy:max", "--out", "runs")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module and a comparison of it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(MODULE)
    done = powernorm(
        folder, *COMMAND, "--norms", "ln,bn,pn", "--seeds", "2", "--set", "learning_rate=0.1"
    )
    assert done.code == 0, done.err
    (folder / "shown.txt").write_text(done.out)
    return folder


def test_the_table_and_the_page(home: Path) -> None:
    shown = (home / "shown.txt").read_text()
    assert "mine:train" in shown
    assert "accuracy" in shown
    assert "gap to ln" in shown
    assert shown.rstrip().endswith("report: runs/report.html")
    results = json.loads((home / "runs" / "results.json").read_text())
    assert results["settings"]["learning_rate"] == 0.1
    assert [(run["norm"], run["seed"]) for run in results["runs"]] == [
        (norm, seed) for norm in ("ln", "bn", "pn") for seed in (0, 1)
    ]
    assert "0.1" in (home / "runs" / "report.html").read_text()


def test_a_race_and_its_continuation(home: Path, tmp_path: Path) -> None:
    """All norms are equal in this training, so that the race is level after three seeds."""
    shutil.copy(home / "mine.py", tmp_path)
    raced = (*COMMAND, "--norms", "ln,bn", "--seeds", "5", "--race", "--race-margin", "100")
    assert powernorm(tmp_path, *raced, "--plan").code == 0
    done = powernorm(tmp_path, "work", "runs")
    assert done.code == 0, done.err
    assert done.err.startswith("importing code that runs names: mine:train\n")
    assert "The race is over after 3 seeds: level within the margin are ln, bn." in done.err
    done = powernorm(tmp_path, *raced, "--resume")
    assert done.code == 0, done.err
    assert "4 of 10 runs were not needed" in done.out
    results = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert results["standing"]["outcome"] == "level"
    assert [run["seed"] for run in results["runs"]] == [0, 1, 2] * 2


@pytest.mark.slow
def test_json_and_quiet(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "mine.py", tmp_path)
    chosen = (*COMMAND, "--norms", "ln", "--seeds", "3,7")
    talking = ("compare", "mine:talking", *chosen[2:], "--out", "talking")
    found = powernorm(tmp_path, *talking, "--json", "--quiet")
    assert (found.code, found.err) == (0, "the function says something\n" * 2)
    assert [run["seed"] for run in json.loads(found.out)["runs"]] == [3, 7]
    assert powernorm(tmp_path, *chosen, "--quiet").code == 0
    quiet = powernorm(tmp_path, *chosen, "--resume", "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    loud = powernorm(tmp_path, *chosen, "--resume", "--json")
    assert json.loads(loud.out)["format"] == 2
    assert loud.err.count("from before") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("mine:train",), "needs --goal METRIC:max"),
        (("mine:train", "--goal", "accuracy:up"), "direction is 'up'"),
        (("mine:nothing", "--goal", "loss:min"), "cannot be loaded"),
        (("nowhere:train", "--goal", "loss:min"), "put that on PYTHONPATH"),
        (("mine.py:train", "--goal", "loss:min"), "name its module, mine:train"),
        (("mine:x", "--goal", "loss:min"), "expected a function or a Task"),
        (("mine:train", "--goal", "loss:min", "--preset", "demo"), "leave it out"),
        (("mine:train", "--goal", "loss:min", "--set", "learningrate=1"), "did you mean"),
        (("mine:train", "--goal", "loss:min", "--set", "steps=many"), "steps=many"),
        (("mine:train", "--goal", "loss:min", "--set", "steps=-3"), "steps=-3: expected at least"),
        (("mine:train", "--goal", "loss:min", "--norms", "layernorm"), "layernorm"),
        (("mine:train", "--goal", "loss:min", "--norms", "ln,ln"), "different short names"),
        (("mine:train", "--goal", "loss:min", "--seeds", "a"), "--seeds a"),
        (("mine:train", "--goal", "loss:min", "--seeds", "0"), "--seeds 0"),
        (("mine:train", "--goal", "loss:min", "--race", "--seeds", "2"), "give at least 3"),
        (("mine:train", "--goal", "loss:min", "--race-margin", "1"), "needs --race: give it, too"),
        (("mine:train", "--goal", "loss:min", "--device", "abacus"), "'abacus'"),
        (("mine:train", "--goal", "speed:max", "--norms", "ln"), "returned no 'speed'"),
        (("lm", "--goal", "loss:min"), "--goal cannot be used with the built-in task lm"),
        (("lm", "--device", "cuda:1"), "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_bad_input_is_one_line(
    home: Path, tmp_path: Path, changes: tuple[str, ...], message: str
) -> None:
    shutil.copy(home / "mine.py", tmp_path)
    assert message in refusal(tmp_path, "compare", *changes, "--out", "runs", "--quiet")
    assert not list(tmp_path.glob("runs/*/result.json"))


def test_a_failed_run_fails_the_command(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "mine.py", tmp_path)
    command = ("compare", "mine:failing", "--goal", "accuracy:max", "--norms", "ln,bn")
    found = powernorm(tmp_path, *command, "--out", "runs", "--quiet")
    assert found.code == 1
    assert found.err.splitlines()[-1] == (
        "error: 1 of 2 runs failed, the first by RuntimeError: boom (runs/bn-seed0); the same "
        "command with --resume retries them"
    )
    assert (tmp_path / "runs" / "report.html").exists()
    # The command does not fail for runs that it was not asked for.
    others = powernorm(tmp_path, *command[:-1], "ln", "--out", "runs", "--quiet", "--resume")
    assert (others.code, others.err) == (0, "")
    assert powernorm(tmp_path, *command, "--out", "planned", "--plan").code == 0
    worked = powernorm(tmp_path, "work", "planned", "--quiet")
    assert (worked.code, "1 failed" in worked.out) == (1, True)
    alone = powernorm(tmp_path, *command[:-1], "ln", "--out", "alone", "--quiet")
    assert alone.code == 0, alone.err


@pytest.mark.slow
@pytest.mark.parametrize("number", some_default([signal.SIGTERM, signal.SIGUSR1], signal.SIGTERM))
def test_a_schedulers_signal_saves_and_says_how_to_go_on(
    home: Path, tmp_path: Path, number: signal.Signals
) -> None:
    shutil.copy(home / "mine.py", tmp_path)
    slow = (*COMMAND, "--norms", "pn", "--set", "steps=500", "--set", "seconds=0.05")
    process = start(tmp_path, *slow)
    log = tmp_path / "runs" / "pn-seed0" / "metrics.csv"
    wait_until(log.exists, process)
    second = powernorm(tmp_path, *slow, "--resume")
    assert f"process {process.pid}" in second.refused()
    err = stopped(process, number, log.exists)
    (line,) = [line for line in err.splitlines() if line.startswith("stopped")]
    assert line.endswith("resume with: powernorm " + " ".join(slow) + " --resume")
    assert (tmp_path / "runs" / "report.html").exists()
    (run,) = json.loads((tmp_path / "runs" / "results.json").read_text())["runs"]
    assert run["status"] == "interrupted"
    # Everything that was logged is in the checkpoint, too.
    steps = int(log.read_text().splitlines()[-1].partition(",")[0])
    begun = start(tmp_path, *slow, "--resume")
    assert begun.stderr is not None
    shown = begun.stderr.readline()
    assert f"from step {steps}" in shown
    begun.send_signal(signal.SIGINT)
    begun.communicate(timeout=SECONDS)
    assert begun.returncode in (75, 130)


def test_diagnose_and_fold_ask_the_task_for_its_model(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "mine.py", tmp_path)
    loading = ("compare", "mine:Loading", "--goal", "loss:min", "--norms", "bn", "--out", "own")
    assert powernorm(tmp_path, *loading, "--quiet").code == 0
    seen = powernorm(tmp_path, "diagnose", "own/bn-seed0", "--batches", "2", "--trust-code")
    assert seen.code == 0, seen.err
    assert (tmp_path / "own/bn-seed0/diagnosis.html").exists()
    folded = powernorm(tmp_path, "fold", "own/bn-seed0", "--out", "folded", "--trust-code")
    assert folded.code == 0, folded.err
    assert (tmp_path / "folded" / "powernorm.safetensors").exists()
    for command in ("diagnose", "fold"):
        run = home / "runs" / "bn-seed0"
        said = refusal(tmp_path, command, run, "--trust-code")
        assert re.search("does not define how to load its model|function of your own", said), said


def test_diagnose_takes_a_model_by_name(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "mine.py", tmp_path)
    seen = powernorm(tmp_path, "diagnose", "mine:named", "--batches", "2")
    assert seen.code == 0, seen.err
    assert re.search(r"^1 +(keep|swap) .*layer$", seen.out, re.M), seen.out
    for name, message in (
        ("mine:broken", "no such weights"),
        ("mine:x", r"expected \(model, batches\)"),
        ("mine:nothing", "cannot be loaded"),
    ):
        assert re.search(message, refusal(tmp_path, "diagnose", name))
    assert "leave out --data" in refusal(tmp_path, "diagnose", "mine:named", "--data", "rt")


SHARED = ("compare", "mine:shared", "--seeds", "1", "--norms", "rbn", "--goal", "loss:min")


def metrics_of(found: Outcome, runs: Path) -> dict[str, float]:
    assert found.code == 0, found.err
    (run,) = json.loads((runs / "results.json").read_text())["runs"]
    assert run["status"] == "finished"
    return run["metrics"]


@pytest.mark.slow
@pytest.mark.distributed
def test_several_processes_train_as_one(home: Path, tmp_path: Path) -> None:
    """Each process trains on its part of every batch, with the mean of the gradients."""
    shutil.copy(home / "mine.py", tmp_path)
    one = powernorm(tmp_path, *SHARED, "--out", "one")
    two = powernorm(tmp_path, *SHARED, "--out", "two", "--devices", "2", fresh=True)
    alone, together = (metrics_of(one, tmp_path / "one"), metrics_of(two, tmp_path / "two"))
    assert (alone["rows"], together["rows"]) == (16, 8)
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert len((tmp_path / "two/rbn-seed0/metrics.csv").read_text().splitlines()) == 7


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("wrap=false",), "differs between the 2 processes.*call run.wrap"),
        (("rows=1",), "batch of 1 rows cannot be divided among 2 processes"),
    ],
)
def test_several_processes_that_would_not_train_as_one(
    home: Path, tmp_path: Path, settings: tuple[str, ...], said: str
) -> None:
    shutil.copy(home / "mine.py", tmp_path)
    options = [part for one in settings for part in ("--set", one)]
    options += ["--out", "two", "--devices", "2", "--quiet"]
    found = powernorm(tmp_path, *SHARED, *options, fresh=True)
    assert re.search(said, found.refused())
