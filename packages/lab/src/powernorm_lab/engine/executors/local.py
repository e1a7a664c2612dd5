"""`powernorm work` as processes of this machine, each with its own GPUs or CPU threads."""

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import torch

from powernorm.errors import InputError
from powernorm.files import check_own, remove
from powernorm_lab.engine.coordination import WorkerEnd
from powernorm_lab.engine.stopping import EXIT_CODE

BAD_INPUT: Final = 2
"""Exit code of `powernorm` after an InputError."""
COMMAND: Final = [sys.executable, "-m", "powernorm"]
LOG_FOLDER: Final = "workers"
_TAIL: Final = 4096
"""Number of bytes at the end of a worker's log that are searched for its last line."""


@dataclass(frozen=True)
class RunSize:
    """Resources that a run needs."""

    num_threads: int
    """CPU threads of each of its processes."""
    num_processes: int = 1
    """Number of processes that train it together; on CUDA each has its own GPU."""

    @property
    def num_cores(self) -> int:
        """Number of CPU cores of a run."""
        return self.num_threads * self.num_processes

    def num_gpus(self, device: torch.device) -> int:
        """Return the number of GPUs of a run on a device."""
        return self.num_processes if device.type == "cuda" else 0


def log_file(out: Path, name: str) -> Path:
    """Return the path of a worker's log; the file exists once the worker has started."""
    return out / LOG_FOLDER / f"{name}.log"


def stop_file(out: Path, name: str) -> Path:
    """Return the path of the file that asks a worker to finish its step, save and exit.

    Workers that signals cannot reach poll for it.
    """
    return out / LOG_FOLDER / f"{name}.stop"


def make_ready(out: Path, name: str) -> None:
    """Create the log folder, and remove files of an earlier worker of the same name."""
    check_own(out / LOG_FOLDER)
    (out / LOG_FOLDER).mkdir(exist_ok=True)
    remove(log_file(out, name), stop_file(out, name))


class QueuedWorker(ABC):
    """A worker that a cluster starts; it may wait in a queue, and signals cannot reach it.

    Args:
        name: name of the worker.
        out: folder of the comparison.
    """

    def __init__(self, name: str, out: Path) -> None:
        self.name = name
        self._out = out

    def stop(self) -> None:
        """Ask the worker to finish its step, save and exit; end it if it is still in the queue."""
        stop_file(self._out, self.name).touch()
        if not log_file(self._out, self.name).exists():
            self.kill()

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""


def start_process(
    out: Path, name: str, size: RunSize, **environment: str
) -> "subprocess.Popen[bytes]":
    """Start a worker.

    The worker exits when this process ends: it reads from a pipe, which then closes.

    Args:
        out: folder of the comparison.
        name: name of the worker.
        size: resources of its runs.
        environment: additional environment variables.
    """
    together = ["--devices", str(size.num_processes)] if size.num_processes > 1 else []
    with log_file(out, name).open("ab") as log:
        # A new session: signals such as Ctrl-C reach only this process, which forwards them.
        return subprocess.Popen(
            [*COMMAND, "work", str(out), "--worker", name, *together],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(size.num_threads)} | environment,
            start_new_session=True,
        )


def end_of(code: int, log: Path) -> WorkerEnd:
    """Return how a worker ended, from its exit code.

    Args:
        code: exit code; negative for a signal.
        log: path of the worker's log.
    """
    if code == 0:
        return WorkerEnd("left", "")
    if code == EXIT_CODE:
        return WorkerEnd("stopped", "")
    if code == BAD_INPUT:
        return WorkerEnd("failed", _last_line(log).removeprefix("error: "))
    if code < 0:
        try:
            how = signal.Signals(-code).name
        except ValueError:
            how = f"signal {-code}"
    else:
        how = f"exit code {code}: {_last_line(log)}"
    return WorkerEnd("lost", f"{how}; see {log}")


def _last_line(log: Path) -> str:
    check_own(log)
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {log}"


GPUS: Final = "CUDA_VISIBLE_DEVICES"
DEVICES: Final = "--devices"


class LocalExecutor:
    """Starts `powernorm work` in processes of this machine.

    Args:
        out: folder of the comparison; the output of the workers goes to `workers/` in it.
        num_workers: maximal number of workers at a time.
        size: cores and processes of a run.
        device: device of the runs; on `cuda` each worker sees as many GPUs as a run has processes.
        retries: number of times that a run is retried after its worker was lost.

    Raises:
        InputError: this machine has too few cores or GPUs.
    """

    def __init__(
        self,
        out: Path,
        num_workers: int,
        *,
        size: RunSize,
        device: torch.device,
        retries: int,
    ) -> None:
        self.num_workers = num_workers
        self.retries = retries
        self._out = out.absolute()
        self._size = size
        self._free_gpus: list[str] | None = None
        check_cores(num_workers, size)
        if device.type == "cuda":
            self._free_gpus = _visible_gpus()
            gpus_per_run = size.num_gpus(device)
            if num_workers * gpus_per_run > len(self._free_gpus):
                raise InputError(
                    f"--jobs {num_workers}, but this machine has {len(self._free_gpus)} GPUs and "
                    f"each run takes {gpus_per_run}: give at most "
                    f"--jobs {max(1, len(self._free_gpus) // gpus_per_run)}, or --device cpu"
                )

    def start(self, names: Sequence[str]) -> "list[LocalWorker]":
        """Start workers."""
        return [self._start(name) for name in names]

    def _start(self, name: str) -> "LocalWorker":
        gpus: list[str] = []
        if self._free_gpus is not None:
            gpus = [self._free_gpus.pop(0) for _ in range(self._size.num_processes)]
        make_ready(self._out, name)
        process = start_process(
            self._out, name, self._size, **({GPUS: ",".join(gpus)} if gpus else {})
        )
        return LocalWorker(name, process, log_file(self._out, name), self, gpus)

    def give_back(self, gpus: list[str]) -> None:
        """Free the GPUs of a worker."""
        if self._free_gpus is not None:
            self._free_gpus += gpus

    def close(self) -> None:
        """Do nothing: ended processes hold no resources."""


class LocalWorker:
    """A process of this machine; see `Worker`."""

    def __init__(
        self,
        name: str,
        process: "subprocess.Popen[bytes]",
        log: Path,
        executor: LocalExecutor,
        gpus: list[str],
    ) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._executor = executor
        self._gpus = gpus
        self._end: WorkerEnd | None = None

    def poll(self) -> WorkerEnd | None:
        """Return how the worker ended; None while it runs."""
        code = self._process.poll()
        if code is None or self._end is not None:
            return self._end
        pipe: IO[bytes] | None = self._process.stdin
        assert pipe is not None
        pipe.close()
        self._executor.give_back(self._gpus)
        self._end = end_of(code, self._log)
        return self._end

    def stop(self) -> None:
        """Ask the worker to finish its step, save and exit."""
        self._process.terminate()

    def kill(self) -> None:
        """End the worker at once."""
        if self.poll() is None:
            self._process.kill()
            self._process.wait()
            self.poll()


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_cores(num_workers: int, size: RunSize) -> None:
    """Refuse more threads than this machine has cores.

    Raises:
        InputError: this machine has too few cores.
    """
    cores = available_cores()
    needed = num_workers * size.num_cores
    if needed > cores:
        together = f"{size.num_processes} processes of " if size.num_processes > 1 else ""
        raise InputError(
            f"--jobs {num_workers} with {together}{size.num_threads} threads each needs "
            f"{needed} cores and this machine has {cores}: give at most "
            f"--jobs {max(1, cores // size.num_cores)}, or fewer --threads"
            + (f" or {DEVICES}" if together else "")
        )


def _visible_gpus() -> list[str]:
    """Return the names of the GPUs that torch sees, in the format of CUDA_VISIBLE_DEVICES."""
    given = os.environ.get(GPUS)
    if given:
        return [part.strip() for part in given.split(",")][: torch.cuda.device_count()]
    return [str(index) for index in range(torch.cuda.device_count())]
