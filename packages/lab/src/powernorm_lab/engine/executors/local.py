"""Workers as processes of this machine, each with its own GPUs or CPU threads."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import torch

from powernorm.errors import InputError
from powernorm_lab.engine.coordination import WorkerEnd
from powernorm_lab.engine.executors.process import (
    RunSize,
    end_of,
    log_file,
    make_ready,
    start_process,
)

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
