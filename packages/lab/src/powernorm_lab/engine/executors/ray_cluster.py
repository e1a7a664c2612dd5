"""Workers that are tasks of a Ray cluster: one that is there, or one of this machine alone."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from powernorm.errors import InputError
from powernorm.integrations.extras import needed_for
from powernorm_lab.engine.coordination import WorkerEnd
from powernorm_lab.engine.executors.local import available_cores, check_cores
from powernorm_lab.engine.executors.process import (
    QueuedWorker,
    RunSize,
    end_of,
    log_file,
    make_ready,
    start_process,
)

ADDRESS: Final = "RAY_ADDRESS"
ANSWER_SECONDS: Final = 10.0
NUMBERS: Final = ("num_cpus", "num_gpus", "memory")


class RayExecutor:
    """Starts `powernorm work` in tasks of a Ray cluster whose machines all see the folder.

    Args:
        out: folder of the comparison; what the workers print goes to `workers/` in it.
        num_workers: at a time.
        size: of a run.
        device: of the runs; on `cuda` each worker gets as many GPUs as a run has processes.
        retries: so often a run is tried again whose worker was lost.
        options: `address` of the cluster (`auto`, `ray://…`, `host:port`; without it the one that
            RAY_ADDRESS names, else one is started on this machine for as long as it takes), what
            a worker takes (`num_cpus`, else the threads of a run; `num_gpus`; `memory` in bytes;
            `accelerator_type`), and any resource of the cluster's own with its amount.

    Raises:
        InputError: Ray is not installed, an option cannot be used, or no cluster answers.
    """

    def __init__(
        self,
        out: Path,
        num_workers: int,
        *,
        size: RunSize,
        device: torch.device,
        retries: int,
        options: Mapping[str, str] | None = None,
    ) -> None:
        # Of its own accord Ray hides the GPUs from tasks that take none, and warns of it.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with needed_for("--executor ray"):
            import ray
        self._ray: Any = ray
        self.num_workers = num_workers
        self.retries = retries
        self._out = out.absolute()
        self._size = size
        chosen = dict(options or {})
        address = chosen.pop("address", None) or os.environ.get(ADDRESS)
        self._needs = {
            "num_cpus": size.num_cores,
            "num_gpus": size.num_gpus(device),
            **_needs_of(chosen),
        }
        if address is None:
            check_cores(num_workers, size)
        self._is_joined = not self._ray.is_initialized()  # else whoever joined it leaves it
        try:
            if self._is_joined:
                self._join(address)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"no Ray cluster answers at {address or 'this machine'}: {error}"
            ) from error
        self._task = self._ray.remote(_work)

    def _join(self, address: str | None) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            cores = available_cores()
            self._ray.init("local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            _check_that_it_answers(address)
            self._ray.init(address, **quiet)

    def start(self, names: Sequence[str]) -> "list[RayWorker]":
        """Start workers, as soon as the cluster has room for each."""
        workers = []
        for name in names:
            make_ready(self._out, name)
            # A lost worker is replaced from here, under a new name.
            task = self._task.options(**self._needs, max_retries=0, name=f"powernorm {name}")
            reference = task.remote(str(self._out), name, self._size)
            workers.append(RayWorker(name, self._out, self._ray, reference))
        return workers

    def close(self) -> None:
        """Leave the cluster; one that was started for this ends."""
        if self._is_joined:
            self._ray.shutdown()


class RayWorker(QueuedWorker):
    """A task of a Ray cluster; see `Worker`."""

    def __init__(self, name: str, out: Path, ray: Any, reference: Any) -> None:
        super().__init__(name, out)
        self._ray = ray
        self._reference = reference

    def poll(self) -> WorkerEnd | None:
        """Return how it ended; None while it works, or waits for room."""
        done, _ = self._ray.wait([self._reference], timeout=0)
        if not done:
            return None
        try:
            code: int = self._ray.get(self._reference)
        except self._ray.exceptions.TaskCancelledError:
            return WorkerEnd("stopped", "")
        except self._ray.exceptions.RayError as error:
            first_line = str(error).strip().partition("\n")[0]
            return WorkerEnd("lost", f"{type(error).__name__}: {first_line}")
        return end_of(code, log_file(self._out, self.name))

    def kill(self) -> None:
        """End it at once."""
        self._ray.cancel(self._reference, force=True)


def _work(out: str, name: str, size: RunSize) -> int:
    """Run a worker on the machine where Ray has put this task, and return its exit code."""
    process: subprocess.Popen[bytes] = start_process(Path(out), name, size)
    return process.wait()


def _check_that_it_answers(address: str) -> None:
    """Raise a ConnectionError where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        except OSError as error:
            raise ConnectionError(str(error)) from error


def _needs_of(options: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's names for what a worker takes."""
    needs: dict[str, Any] = {}
    own: dict[str, float] = {}
    for name, text in options.items():
        if name == "accelerator_type":
            needs[name] = text
            continue
        try:
            amount = float(text)
        except ValueError:
            amount = -1.0
        if amount < 0:
            raise InputError(f"--executor-option {name}={text}: give an amount, such as {name}=1")
        if name in NUMBERS:
            needs[name] = amount
        else:
            own[name] = amount
    return {**needs, "resources": own} if own else needs
