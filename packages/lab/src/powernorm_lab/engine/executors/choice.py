"""The user's choice of workers for a comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError
from powernorm_lab.engine.coordination import Executor
from powernorm_lab.engine.executors.local import LocalExecutor, RunSize
from powernorm_lab.engine.executors.ray_cluster import RayExecutor
from powernorm_lab.engine.executors.slurm import SlurmExecutor
from powernorm_lab.engine.folders import find_runs, threads_of
from powernorm_lab.engine.grid import Grid

EXECUTORS: Final = ("local", "ray", "slurm")


@dataclass(frozen=True)
class Workers:
    """Number and kind of the workers of a comparison."""

    jobs: int = 1
    """Runs at a time."""
    executor: str | None = None
    """`local`, `ray` or `slurm`; None is `local` for several jobs, and this process for one."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the executor."""
    retries: int = 3
    """Number of times that a run is retried after its worker was lost."""
    num_processes: int = 1
    """Number of processes that train each run together."""

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            InputError: a number is too small, or the executor is unknown or has no options.
        """
        for name, number, least in (
            ("jobs", self.jobs, 1),
            ("devices", self.num_processes, 1),
            ("retries", self.retries, 0),
        ):
            if number < least:
                raise InputError(f"{name} is {number}: give at least {least}")
        if self.executor not in (None, *EXECUTORS):
            raise InputError(f"--executor {self.executor}: choose {', '.join(EXECUTORS)}")
        if self.options and self.executor not in ("ray", "slurm"):
            name = next(iter(self.options))
            raise InputError(f"--executor-option {name} is for --executor ray or slurm")

    @property
    def are_used(self) -> bool:
        """Whether other processes than this one train."""
        return self.jobs > 1 or self.executor is not None

    def threads(self, chosen: int | None, resumed: Path | None = None) -> int | None:
        """Return the CPU threads of a run; None is torch's default.

        Args:
            chosen: the user's number; None is that of the resumed runs, else 1 for workers.
            resumed: folder of runs to resume; None for new runs.
        """
        runs = [] if chosen or resumed is None else find_runs(resumed)
        known = threads_of(runs[0]) if runs else None
        return chosen or known or (1 if self.are_used else None)

    def start_executor(self, out: Path, grid: Grid) -> Executor:
        """Return the executor that starts the workers.

        Args:
            out: folder of the comparison.
            grid: grid that they train.

        Raises:
            InputError: other processes cannot train the grid, a package is missing, or the machine
                has too few cores or GPUs.
        """
        grid.work_record()  # raises an InputError if other processes cannot train it
        size = RunSize(grid.num_threads or 1, self.num_processes)
        common: Any = {"size": size, "device": grid.device, "retries": self.retries}
        if self.executor == "ray":
            return RayExecutor(out, self.jobs, **common, options=self.options)
        if self.executor == "slurm":
            return SlurmExecutor(out, self.jobs, **common, options=self.options)
        return LocalExecutor(out, self.jobs, **common)
