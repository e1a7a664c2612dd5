"""Comparisons by workers of Ray and submitit have the results of one process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import unruly_workers
from lab.tests.stopped_commands import stopped, wait_until
from test_workers import (
    PATHS,
    assert_equal,
    assert_that_nothing_is_lost_when_workers_are_killed,
    compared,
    said,
)

from powernorm.errors import InputError
from powernorm_lab.engine.events import Event, Notice, RunEnded
from powernorm_lab.engine.executors.local import available_cores

pytestmark = pytest.mark.skipif(available_cores() < 2, reason="one core")

ENGINES = {
    "ray": {"executor": "ray"},
    "submitit": {"executor": "slurm", "executor_options": {"cluster": "local"}},
}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment that workers of a cluster inherit."""
    monkeypatch.setenv("PYTHONPATH", PATHS + os.pathsep + os.environ.get("PYTHONPATH", ""))


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("serial")
    compared(out)
    return out


@pytest.mark.slow
@engines
def test_workers_come_to_what_one_process_does(
    serial: Path, tmp_path: Path, engine: dict[str, Any]
) -> None:
    events: list[Event] = []
    compared(tmp_path, jobs=2, events=events, **engine)
    assert_equal(serial, tmp_path)
    assert sum(isinstance(event, RunEnded) for event in events) == 4
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*/result.json")]
    assert {result["ran_on"]["worker"] for result in results} <= {"worker-1", "worker-2"}
    assert (tmp_path / "workers" / "worker-1.log").stat().st_size


@pytest.mark.slow
@engines
def test_a_run_whose_worker_is_lost_goes_on_in_another(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    compared(tmp_path / "one", unruly_workers.killed_once, settings={"after": 0})
    events: list[Event] = []
    compared(tmp_path / "two", unruly_workers.killed_once, jobs=2, events=events, **engine)
    results = [said(tmp_path / name) for name in ("one", "two")]
    assert results[0] == results[1]
    lost = [event.message for event in events if isinstance(event, Notice)]
    assert len(lost) == 4
    assert all("was lost (SIGKILL; see " in message for message in lost)


@pytest.mark.slow
@engines
def test_an_interrupted_comparison_leaves_no_worker_and_goes_on(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    settings = {"steps": 150, "checkpoint_every": 2}
    options = ["--executor", engine["executor"], "--jobs", "2"]
    for name, value in engine.get("executor_options", {}).items():
        options += ["--executor-option", f"{name}={value}"]
    command = [sys.executable, "-m", "powernorm", "compare", "own_training:train", "--norms"]
    command += ["ln,bn", "--seeds", "2", "--goal", "accuracy:max", "--device", "cpu"]
    command += ["--out", "out", *options]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stderr=subprocess.PIPE)
    wait_until(lambda: list(tmp_path.glob("out/*/checkpoints/last.ckpt")), process)
    owners = [json.loads(path.read_text()) for path in tmp_path.glob("out/*/lease.json")]
    error = stopped(process, signal.SIGINT, lambda: True)
    assert "resume with: powernorm compare" in error
    for owner in owners:
        assert not Path(f"/proc/{owner['pid']}").exists()
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert {run["status"] for run in runs} <= {"interrupted", "finished"}
    done = subprocess.run([*command, "--resume", "-q"], cwd=tmp_path, check=False, timeout=400)
    assert done.returncode == 0
    compared(tmp_path / "serial", norms=["ln", "bn"], settings=settings)
    assert_equal(tmp_path / "serial", tmp_path / "out")


@pytest.mark.slow
def test_a_job_that_is_to_be_requeued_saves_and_goes_on(
    tmp_path: Path,
) -> None:
    """SLURM sends the signal before a time limit or a preemption."""
    settings = {"steps": 150, "checkpoint_every": 2}
    command = [sys.executable, "-m", "powernorm", "compare", "own_training:train", "--norms", "bn"]
    command += ["--seeds", "1", "--goal", "accuracy:max", "--device", "cpu", "--out", "out", "-q"]
    command += ["--executor", "slurm", "--executor-option", "cluster=local"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stderr=subprocess.PIPE)
    wait_until(lambda: list(tmp_path.glob("out/*/checkpoints/last.ckpt")), process)
    (pickle,) = tmp_path.glob("out/workers/jobs/*_submitted.pkl")
    controller = pickle.name.partition("_")[0]
    children = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGUSR2)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    (log,) = tmp_path.glob("out/workers/*.log")
    assert "resume with: powernorm work" in log.read_text()
    compared(tmp_path / "serial", norms=["bn"], seeds=1, settings=settings)
    assert_equal(tmp_path / "serial", tmp_path / "out")


@pytest.mark.slow
@engines
def test_nothing_is_lost_when_workers_of_a_cluster_are_killed(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    assert_that_nothing_is_lost_when_workers_are_killed(tmp_path, 60, **engine)


@pytest.mark.slow
def test_a_comparison_whose_ray_cluster_has_died_goes_on(tmp_path: Path) -> None:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    settings = {"steps": 150, "checkpoint_every": 2}
    command = [sys.executable, "-m", "powernorm", "compare", "own_training:train", "--norms"]
    command += ["ln,bn", "--seeds", "2", "--goal", "accuracy:max", "--device", "cpu"]
    command += ["--out", "out", "--executor", "ray", "--jobs", "2", "-q", "--executor-option"]
    command += [f"address={address}"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    for attempt in ("died", "went on"):
        head = subprocess.Popen(
            [*ray, f"--port={port}", "--num-cpus=2", "--include-dashboard=false"],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for_a_cluster(address)
            process = subprocess.Popen(
                [*command, "--resume"], cwd=tmp_path, text=True, stderr=subprocess.PIPE
            )
            if attempt == "died":
                wait_until(lambda: list(tmp_path.glob("out/*/checkpoints/last.ckpt")), process)
                os.killpg(head.pid, signal.SIGKILL)
            _, error = process.communicate(timeout=300)
            if attempt == "died":
                # On a busy machine workers may be done before they notice.
                assert process.returncode in (0, 1), error
                assert process.returncode == 0 or "Failed to connect to GCS" in error
            else:
                assert process.returncode == 0, error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
            head.wait()
    compared(tmp_path / "serial", norms=["ln", "bn"], settings=settings)
    assert_equal(tmp_path / "serial", tmp_path / "out")


def _wait_for_a_cluster(address: str) -> None:
    deadline = time.monotonic() + 120
    host, _, port = address.partition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "dask"}, "--executor dask: choose local, ray, slurm"),
        ({"executor_options": {"partition": "gpu"}}, "--executor-option partition is for"),
        ({"executor": "slurm"}, "outside of a cluster use --executor-option cluster=local"),
        (
            {"executor": "slurm", "executor_options": {"cluster": "moon"}},
            "cluster=moon: choose slurm or local",
        ),
        (
            {"executor": "slurm", "executor_options": {"cluster": "local", "partitoin": "gpu"}},
            "partitoin",
        ),
        ({"executor": "ray", "executor_options": {"num_gpus": "two"}}, "num_gpus=two: give an am"),
        ({"executor": "ray", "jobs": 10_000}, "this machine has"),
        (
            {"executor": "ray", "executor_options": {"address": "127.0.0.1:1"}},
            "no Ray cluster answers at 127.0.0.1:1",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compared(tmp_path / "out", **{"jobs": 2, **options})
    assert not (tmp_path / "out").exists()
