"""Comparisons by several processes have the results of one process, whatever happens."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import unruly_workers
from lab.tests.stopped_commands import stopped, wait_until

import powernorm_lab as lab
from commands import refusal
from own_training import Classifier, train
from powernorm.errors import InputError
from powernorm_lab.engine.events import Event, Notice, RunEnded, RunStarted, StepsDone
from powernorm_lab.engine.executors import local
from powernorm_lab.engine.executors.local import LocalExecutor, RunSize, available_cores
from powernorm_lab.engine.folders import read_json
from powernorm_lab.engine.run import Run

PATHS = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
needs_two_cores = pytest.mark.skipif(available_cores() < 2, reason="one core")


def compared(
    out: Path, function: Any = train, events: list[Event] | None = None, **changes: Any
) -> lab.Comparison:
    chosen: dict[str, Any] = {"norms": ["bn", "pn"], "seeds": 2, "goal": {"accuracy": "max"}}
    chosen |= {"device": "cpu", "num_threads": 1, **changes}
    listener = None if events is None else events.append
    return lab.compare(function, out, quiet=True, on_event=listener, **chosen)


def said(out: Path) -> dict[str, dict[str, Any]]:
    """Return results without times and places; result.json and results.json must agree."""
    together = {run["folder"]: run for run in read_json(out / "results.json")["runs"]}
    alone = {path.parent.name: read_json(path) for path in out.glob("*/result.json")}
    assert together == alone
    for result in together.values():
        for name in ("seconds", "tokens_per_second", "ran_on"):
            result.pop(name, None)
    return together


def rows(path: Path) -> list[str]:
    """Return the lines of a log without times."""
    header, *lines = path.read_text().splitlines()
    place = header.split(",").index("seconds") if "seconds" in header else None
    cells = [line.split(",") for line in (header, *lines)]
    return [",".join(c for i, c in enumerate(line) if i != place) for line in cells]


def assert_equal(one: Path, other: Path) -> None:
    assert said(one) == said(other)
    for path in one.glob("*/*.csv"):
        assert rows(path) == rows(other / path.relative_to(one)), path
    left = [path for path in other.glob("*/*") if path.name in ("lease.json", ".lock")]
    assert not left


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("serial")
    compared(out)
    return out


@needs_two_cores
def test_two_at_a_time_come_to_what_one_after_the_other_does(serial: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    found = compared(tmp_path, jobs=2, events=events)
    assert_equal(serial, tmp_path)
    assert [run.status for run in found.runs] == ["finished"] * 4
    places = [json.loads(path.read_text())["ran_on"] for path in tmp_path.glob("*/result.json")]
    assert {place["worker"] for place in places} <= {"worker-1", "worker-2"}
    assert (tmp_path / "workers" / "worker-1.log").stat().st_size
    started = [(event.norm, event.seed) for event in events if isinstance(event, RunStarted)]
    ended = [event for event in events if isinstance(event, RunEnded)]
    assert sorted(started) == [("bn", 0), ("bn", 1), ("pn", 0), ("pn", 1)]
    assert len(ended) == 4
    assert not any(event.skipped for event in ended)
    steps = [event.step for event in events if isinstance(event, StepsDone) and event.norm == "pn"]
    assert sorted(steps) == sorted([*range(1, 21), *range(1, 21)])
    # All runs are over: no worker is started.
    events.clear()
    compared(tmp_path, jobs=2, events=events, resume=True)
    assert {type(event) for event in events} == {RunEnded}
    assert_equal(serial, tmp_path)


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_whose_worker_is_lost_goes_on_in_another(tmp_path: Path, seeds: int) -> None:
    compared(tmp_path / "one", unruly_workers.killed_once, settings={"after": 0}, seeds=seeds)
    events: list[Event] = []
    compared(tmp_path / "two", unruly_workers.killed_once, jobs=2, events=events, seeds=seeds)
    results = [said(tmp_path / name) for name in ("one", "two")]
    assert results[0] == results[1]
    lost = [event.message for event in events if isinstance(event, Notice)]
    assert len(lost) == 2 * seeds
    assert all("was lost (SIGKILL; see " in message for message in lost)
    logs = "".join(path.read_text() for path in (tmp_path / "two" / "workers").glob("*.log"))
    assert logs.count("12 steps, from step 8") == 2 * seeds


@needs_two_cores
@pytest.mark.slow
def test_a_run_that_always_ends_its_worker_is_given_up_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    found = compared(tmp_path, unruly_workers.killed_with_pn, jobs=2, retries=1, seeds=1)
    statuses = {run.norm: run.status for run in found.runs}
    assert statuses == {"bn": "finished", "pn": "failed"}
    message = json.loads((tmp_path / "pn-seed0" / "result.json").read_text())["message"]
    assert "its worker was lost 2 times (killed, or out of memory?)" in message
    assert len(list((tmp_path / "workers").glob("*.log"))) >= 2
    # It is retried with `resume`.
    found = compared(
        tmp_path, unruly_workers.killed_with_pn, jobs=2, retries=0, seeds=1, resume=True
    )
    assert {run.norm: run.status for run in found.runs} == statuses
    again = json.loads((tmp_path / "pn-seed0" / "result.json").read_text())["message"]
    assert "was lost 1 times" in again


@needs_two_cores
@pytest.mark.slow
def test_a_run_that_fails_is_not_tried_by_the_next_worker(tmp_path: Path) -> None:
    found = compared(tmp_path, unruly_workers.failing_with_pn, jobs=2, seeds=1)
    assert {run.norm: run.status for run in found.runs} == {"bn": "finished", "pn": "failed"}
    assert (tmp_path / "calls").read_text().split() == ["pn"]
    result = json.loads((tmp_path / "pn-seed0" / "result.json").read_text())
    assert result["message"] == "ValueError: no pn today"


@needs_two_cores
@pytest.mark.slow
def test_what_every_worker_would_meet_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"returned no 'accuracy', which is the goal"):
        compared(tmp_path, unruly_workers.without_goal, jobs=2)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*/result.json")]
    assert {result["status"] for result in results} <= {"interrupted"}


@needs_two_cores
def test_workers_that_are_lost_at_once_are_not_replaced_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "COMMAND", [sys.executable, "-c", "import os; os.abort()"])
    with pytest.raises(InputError, match="lost before they train anything: SIGABRT; see "):
        compared(tmp_path, jobs=2, retries=1)
    assert len(list((tmp_path / "workers").iterdir())) == 4


@pytest.mark.parametrize("change", [{"jobs": 0}, {"devices": 0}, {"retries": -1}])
def test_too_few_workers_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    ((name, number),) = change.items()
    with pytest.raises(InputError, match=f"^{name} is {number}: give at least {number + 1}$"):
        compared(tmp_path, **change)


def test_resumed_runs_have_the_threads_of_the_others(tmp_path: Path) -> None:
    compared(tmp_path, seeds=1)
    compared(tmp_path, seeds=2, resume=True, num_threads=None)
    configs = [read_json(path) for path in tmp_path.glob("*/config.json")]
    assert [config["num_threads"] for config in configs] == [1, 1, 1, 1]


def test_more_jobs_than_cores_are_refused(tmp_path: Path) -> None:
    cores = available_cores()
    with pytest.raises(InputError, match=f"this machine has {cores}: give at most --jobs {cores}"):
        compared(tmp_path, jobs=cores + 1)
    with pytest.raises(InputError, match=f"with {cores} threads each needs {2 * cores} cores"):
        compared(tmp_path, jobs=2, num_threads=cores)
    assert not list(tmp_path.iterdir())


@needs_two_cores
def test_a_function_that_workers_cannot_import_is_refused(tmp_path: Path) -> None:
    def inner(run: Run, *, steps: int = 3) -> dict[str, float]:
        run.swap(Classifier())
        return {"accuracy": float(steps)}

    with pytest.raises(InputError, match="inner cannot be imported by other processes"):
        compared(tmp_path, inner, jobs=2)
    assert not list(tmp_path.iterdir())
    # One process needs no import.
    compared(tmp_path, inner)
    assert not (tmp_path / "work.json").exists()


def test_each_worker_sees_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(local, "available_cores", lambda: 16)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])"
    real, started = subprocess.Popen, []

    def start(command: list[str], **options: Any) -> Any:
        started.append(command)
        return real([sys.executable, "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    device = torch.device("cuda")
    with pytest.raises(InputError, match="--jobs 3, but this machine has 2 GPUs"):
        LocalExecutor(tmp_path, 3, size=RunSize(1), device=device, retries=0)
    with pytest.raises(InputError, match="and each run takes 2: give at most --jobs 1, or"):
        LocalExecutor(tmp_path, 2, size=RunSize(1, 2), device=device, retries=0)
    executor = LocalExecutor(tmp_path, 2, size=RunSize(3), device=device, retries=0)
    for turn in range(2):
        workers = executor.start([f"w{turn}{number}" for number in range(2)])
        for worker in workers:
            while worker.poll() is None:
                time.sleep(0.01)
        said = sorted((tmp_path / "workers" / f"{w.name}.log").read_text() for w in workers)
        assert said == ["4 3\n", "7 3\n"]
    assert started[0][1:4] == ["-m", "powernorm", "work"]
    (worker,) = LocalExecutor(tmp_path, 1, size=RunSize(2, 2), device=device, retries=0).start(
        ["pair"]
    )
    while worker.poll() is None:
        time.sleep(0.01)
    assert (tmp_path / "workers" / "pair.log").read_text() == "4,7 2\n"
    assert started[-1][-2:] == ["--devices", "2"]


def _environment() -> dict[str, str]:
    paths = [PATHS, os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def powernorm(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "powernorm", *arguments]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


COMMAND = [
    "compare",
    "own_training:train",
    "--norms",
    "bn,pn",
    "--seeds",
    "2",
    "--goal",
    "accuracy:max",
    "--device",
    "cpu",
    "--out",
    "out",
]


@needs_two_cores
@pytest.mark.slow
@pytest.mark.distributed
def test_a_worker_can_be_several_processes(tmp_path: Path) -> None:
    """A run that several processes train together has the same result without workers."""
    one = powernorm(*COMMAND, "--threads", "1", "--devices", "2", cwd=tmp_path)
    _, errors = one.communicate()
    assert one.returncode == 0, errors
    (tmp_path / "out").rename(tmp_path / "one")
    command = [*COMMAND, "--threads", "1", "--devices", "2", "--executor", "local"]
    refused = powernorm(*command, "--jobs", "4096", cwd=tmp_path)
    assert "2 processes of 1 threads each needs 8192 cores" in refused.communicate()[1]
    two = powernorm(*command, cwd=tmp_path)
    _, errors = two.communicate()
    assert two.returncode == 0, errors
    assert_equal(tmp_path / "one", tmp_path / "out")
    places = [json.loads(path.read_text())["ran_on"] for path in tmp_path.glob("out/*/result.json")]
    assert [place["processes"] for place in places] == [2] * 4
    assert {place["worker"] for place in places} == {"worker-1"}


@pytest.mark.slow
def test_processes_started_by_hand_share_a_planned_folder(serial: Path, tmp_path: Path) -> None:
    planned = powernorm(*COMMAND, "--plan", "--threads", "1", cwd=tmp_path)
    out, error = planned.communicate(timeout=120)
    assert planned.returncode == 0, error
    assert "powernorm work out" in out
    workers = [powernorm("work", "out", cwd=tmp_path) for _ in range(2)]
    for worker in workers:
        out, error = worker.communicate(timeout=300)
        assert worker.returncode == 0, error
        assert "no run is left" in out
    assert_equal(serial, tmp_path / "out")
    assert not (tmp_path / "out" / "lease.json").exists()
    hosts = {run["ran_on"]["host"] for run in _runs(tmp_path / "out")}
    assert len(hosts) == 1


def _runs(out: Path) -> list[Mapping[str, Any]]:
    runs: list[Mapping[str, Any]] = json.loads((out / "results.json").read_text())["runs"]
    return runs


def test_a_folder_without_a_plan_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, "work", ".")
    assert "has no work.json, which says what to train: create it with" in error


@needs_two_cores
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_from_outside_leaves_no_process_and_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    settings = {"steps": 150, "checkpoint_every": 2}
    command = [*COMMAND, "--norms", "ln,bn", "--jobs", "2"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    process = powernorm(*command, cwd=tmp_path)
    wait_until(lambda: list(tmp_path.glob("out/*/checkpoints/last.ckpt")), process)
    owners = [json.loads(path.read_text()) for path in tmp_path.glob("out/*/lease.json")]
    error = stopped(process, number, lambda: True)
    wait_until(lambda: not any(_is_running(owner["pid"]) for owner in owners))
    if number != signal.SIGKILL:
        assert "resume with: powernorm compare" in error
        statuses = {run["status"] for run in _runs(tmp_path / "out")}
        assert statuses <= {"interrupted", "finished"}
    resumed = powernorm(*command, "--resume", "--json", "-q", cwd=tmp_path)
    out, error = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, error
    assert [run["status"] for run in json.loads(out)["runs"]] == ["finished"] * 4
    compared(tmp_path / "serial", norms=["ln", "bn"], settings=settings)
    assert_equal(tmp_path / "serial", tmp_path / "out")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@needs_two_cores
@pytest.mark.slow
def test_a_script_is_imported_by_its_workers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from own_training import Classifier\n"
        "import powernorm_lab as lab\n"
        "def train(run, *, steps: int = 3):\n"
        "    run.swap(Classifier())\n"
        "    return {'accuracy': float(run.seed)}\n"
        "if __name__ == '__main__':\n"
        "    lab.compare(train, 'out', norms=['bn'], seeds=2, goal={'accuracy': 'max'}, jobs=2,\n"
        "                quiet=True, device='cpu')\n"
    )
    subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=_environment(), check=True, timeout=300
    )
    assert [run["metrics"]["accuracy"] for run in _runs(tmp_path / "out")] == [0.0, 1.0]


def assert_that_nothing_is_lost_when_workers_are_killed(
    folder: Path, num_kills: int, **changes: Any
) -> None:
    """Train 200 runs while busy workers are killed at random moments."""
    settings = {"seeds": 50, "norms": ["ln", "bn", "rbn", "pn"]}
    compared(folder / "serial", unruly_workers.counted, **settings)
    chance = random.Random(0)
    killed: list[int] = []
    is_over = threading.Event()

    def kill_some() -> None:
        while len(killed) < num_kills and not is_over.wait(chance.uniform(0, 0.05)):
            paths = sorted((folder / "out").glob("*/lease.json"))
            if paths:
                with suppress(FileNotFoundError, ProcessLookupError):
                    owner = json.loads(chance.choice(paths).read_text())
                    if owner["pid"] not in (os.getpid(), *killed):
                        os.kill(owner["pid"], signal.SIGKILL)
                        killed.append(owner["pid"])

    killer = threading.Thread(target=kill_some)
    killer.start()
    try:
        lab.compare(
            unruly_workers.counted,
            folder / "out",
            goal={"accuracy": "max"},
            device="cpu",
            jobs=2,
            retries=num_kills,  # so that no run is given up
            quiet=True,
            **settings,  # type: ignore[arg-type]
            **changes,
        )
    finally:
        is_over.set()
        killer.join()
    assert len(killed) == num_kills
    assert_equal(folder / "serial", folder / "out")
    assert len(_runs(folder / "out")) == 200
    # A run ends twice if its worker was killed before the result was written.
    ends = (folder / "out" / "ends").read_text().split()
    assert len(set(ends)) == 200
    assert len(ends) - 200 <= len(killed)


@needs_two_cores
@pytest.mark.slow
def test_nothing_is_lost_or_done_twice_when_workers_are_killed(tmp_path: Path) -> None:
    assert_that_nothing_is_lost_when_workers_are_killed(tmp_path, 60)
