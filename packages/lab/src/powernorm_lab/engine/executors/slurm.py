"""Workers as jobs of a SLURM cluster, submitted by submitit."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from powernorm.errors import InputError
from powernorm.integrations.extras import needed_for
from powernorm_lab.engine.coordination import WorkerEnd
from powernorm_lab.engine.executors.local import (
    LOG_FOLDER,
    QueuedWorker,
    RunSize,
    end_of,
    log_file,
    make_ready,
    start_process,
)

CLUSTERS: Final = ("slurm", "local")
GENERIC: Final = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")
"""submitit's parameters for every cluster; all others are SLURM's."""
MAX_TIMEOUTS: Final = 1000
"""Number of times that a job is requeued after its time limit, to resume its run."""
DEFAULT_TIMEOUT_MIN: Final = 60
SAVING_SECONDS: Final = 120
"""Seconds between the signal and the time limit, to finish a step and save."""


class SlurmExecutor:
    """Submits `powernorm work` as jobs of SLURM, an array for workers that start together.

    A job that is preempted or reaches its time limit saves and is requeued.

    Args:
        out: folder of the comparison, visible from all nodes; the output of the workers goes to
            `workers/` in it, and submitit's files to `workers/jobs/`.
        num_workers: maximal number of jobs at a time.
        size: cores and processes of a run.
        device: device of the runs; on `cuda` each job requests as many GPUs as a run has processes.
        retries: number of times that a run is retried after its worker was lost.
        options: submitit's parameters: `timeout_min` (60), `mem_gb`, `cpus_per_task`,
            `gpus_per_node`, and SLURM's by submitit's names without the prefix: `partition`,
            `account`, `qos`, `constraint`, `signal_delay_s` (120), …; `cluster=local` runs the
            jobs on this machine, to test a command.

    Raises:
        InputError: submitit is not installed, there is no SLURM, or an option is invalid.
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
        with needed_for("--executor slurm"):
            import submitit
        self._submitit: Any = submitit
        self.num_workers = num_workers
        self.retries = retries
        self._out = out.absolute()
        self._size = size
        chosen = {name: _value(text) for name, text in (options or {}).items()}
        cluster = chosen.pop("cluster", "slurm")
        if cluster not in CLUSTERS:
            raise InputError(f"--executor-option cluster={cluster}: choose slurm or local")
        self._cluster = cluster
        self._parameters: dict[str, Any] = {
            "name": "powernorm",
            "timeout_min": DEFAULT_TIMEOUT_MIN,
            "cpus_per_task": size.num_cores,
            "gpus_per_node": size.num_gpus(device),
            "stderr_to_stdout": True,
            "slurm_signal_delay_s": SAVING_SECONDS,
        }
        for name, value in chosen.items():
            self._parameters[name if name in GENERIC else f"slurm_{name}"] = value
        try:
            # A check in another folder: that of the comparison may not be free.
            with TemporaryDirectory() as folder:
                self._executor(Path(folder))
        except (NameError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"--executor slurm: {error}; outside of a cluster use --executor-option "
                "cluster=local"
            ) from error

    def _executor(self, folder: Path) -> Any:
        executor = self._submitit.AutoExecutor(
            folder, self._cluster, **{f"{self._cluster}_max_num_timeout": MAX_TIMEOUTS}
        )
        executor.update_parameters(**self._parameters)
        return executor

    def start(self, names: Sequence[str]) -> "list[SlurmWorker]":
        """Submit workers, several of them as one array."""
        for name in names:
            make_ready(self._out, name)
        executor = self._executor(self._out / LOG_FOLDER / "jobs")
        with executor.batch():
            jobs = [executor.submit(_WorkerJob(str(self._out), name, self._size)) for name in names]
        return [
            SlurmWorker(name, self._out, self._submitit, job)
            for name, job in zip(names, jobs, strict=True)
        ]

    def close(self) -> None:
        """Do nothing: ended jobs hold no resources."""


class SlurmWorker(QueuedWorker):
    """A job of SLURM; see `Worker`."""

    def __init__(self, name: str, out: Path, submitit: Any, job: Any) -> None:
        super().__init__(name, out)
        self._submitit = submitit
        self._job = job
        self._was_canceled = False

    def poll(self) -> WorkerEnd | None:
        """Return how the worker ended; None while it runs or waits in the queue."""
        if not self._job.done():
            return None
        if self._was_canceled:
            return WorkerEnd("stopped", "")
        try:
            code: int = self._job.result()
        except self._submitit.core.utils.UncompletedJobError as error:
            first_line = str(error).strip().partition("\n")[0]
            return WorkerEnd("lost", f"{first_line}; see {self._job.paths.stdout}")
        return end_of(code, log_file(self._out, self.name))

    def kill(self) -> None:
        """End the worker at once."""
        self._was_canceled = True
        self._job.cancel(check=False)


class _WorkerJob:
    """A job's function; submitit pickles it when it submits or requeues the job."""

    def __init__(self, out: str, name: str, size: RunSize) -> None:
        self._arguments = out, name, size
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Run a worker and return its exit code."""
        out, name, size = self._arguments
        process = self._process = start_process(Path(out), name, size)
        # `scancel` sends SIGTERM, which submitit would ignore.
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()

    def checkpoint(self) -> Any:
        """Let the worker save and exit, and return the submission that resumes the job."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            # submitit calls this in a signal handler during the `wait` above, which holds a lock
            # that a second `wait` would block on.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(_WorkerJob(*self._arguments))


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
