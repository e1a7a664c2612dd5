"""Workers as tasks of a Ray cluster: an existing one, or a new one on this machine."""

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
from powernorm_lab.engine.executors.local import (
    QueuedWorker,
    RunSize,
    available_cores,
    check_cores,
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
        out: folder of the comparison; the output of the workers goes to `workers/` in it.
        num_workers: maximal number of workers at a time.
        size: cores and processes of a run.
        device: device of the runs; on `cuda` each worker gets as many GPUs as a run has processes.
        retries: number of times that a run is retried after its worker was lost.
        options: `address` of the cluster (`auto`, `ray://…` or `host:port`; the default is that of
            RAY_ADDRESS, else a cluster is started on this machine until `close`), the resources of
            a worker (`num_cpus`, by default the threads of a run; `num_gpus`; `memory` in bytes;
            `accelerator_type`), and amounts of any custom resource of the cluster.

    Raises:
        InputError: Ray is not installed, an option is invalid, or no cluster answers.
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
        # By default Ray hides the GPUs from tasks that request none, and warns about it.
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
        self._is_joined = not self._ray.is_initialized()  # else the caller manages the connection
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
        """Submit workers; each starts as soon as the cluster has its resources."""
        workers = []
        for name in names:
            make_ready(self._out, name)
            # No retries by Ray: the coordinator replaces a lost worker under a new name.
            task = self._task.options(**self._needs, max_retries=0, name=f"powernorm {name}")
            reference = task.remote(str(self._out), name, self._size)
            workers.append(RayWorker(name, self._out, self._ray, reference))
        return workers

    def close(self) -> None:
        """Disconnect from the cluster; one that was started here ends."""
        if self._is_joined:
            self._ray.shutdown()


class RayWorker(QueuedWorker):
    """A task of a Ray cluster; see `Worker`."""

    def __init__(self, name: str, out: Path, ray: Any, reference: Any) -> None:
        super().__init__(name, out)
        self._ray = ray
        self._reference = reference

    def poll(self) -> WorkerEnd | None:
        """Return how the worker ended; None while it runs or waits for resources."""
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
        """End the worker at once."""
        self._ray.cancel(self._reference, force=True)


def _work(out: str, name: str, size: RunSize) -> int:
    """Run a worker on the machine of this Ray task, and return its exit code."""
    process: subprocess.Popen[bytes] = start_process(Path(out), name, size)
    return process.wait()


def _check_that_it_answers(address: str) -> None:
    """Raise a ConnectionError if nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        except OSError as error:
            raise ConnectionError(str(error)) from error


def _needs_of(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the resources of a worker by Ray's names."""
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
