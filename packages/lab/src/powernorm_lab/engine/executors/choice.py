"""Which workers train a comparison, as users choose it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError
from powernorm_lab.engine.coordination import Executor
from powernorm_lab.engine.executors.local import LocalExecutor
from powernorm_lab.engine.executors.process import RunSize
from powernorm_lab.engine.executors.ray_cluster import RayExecutor
from powernorm_lab.engine.executors.slurm import SlurmExecutor
from powernorm_lab.engine.grid import Grid

EXECUTORS: Final = ("local", "ray", "slurm")


@dataclass(frozen=True)
class Workers:
    """Who trains the runs of a comparison."""

    jobs: int = 1
    """Runs at a time."""
    executor: str | None = None
    """`local`, `ray` or `slurm`; None is `local` where there are several jobs, else this process
    itself trains."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the executor."""
    retries: int = 3
    """So often a run is tried again whose worker was lost."""
    num_processes: int = 1
    """Processes that train each run together."""

    def __post_init__(self) -> None:
        """Check what was given.

        Raises:
            InputError: there is no such executor, or it has no options.
        """
        if self.executor not in (None, *EXECUTORS):
            raise InputError(f"--executor {self.executor}: choose {', '.join(EXECUTORS)}")
        if self.options and self.executor not in ("ray", "slurm"):
            name = next(iter(self.options))
            raise InputError(f"--executor-option {name} is for --executor ray or slurm")

    @property
    def are_used(self) -> bool:
        """Whether other processes than this one train."""
        return self.jobs > 1 or self.executor is not None

    def threads(self, chosen: int | None) -> int | None:
        """Return the CPU threads of a run: what is chosen, else 1; None is torch's."""
        return chosen or (1 if self.are_used else None)

    def start_executor(self, out: Path, grid: Grid) -> Executor:
        """Return what starts the workers.

        Args:
            out: folder of the comparison.
            grid: what they train.

        Raises:
            InputError: other processes cannot train it, a package is missing, or what is asked for
                is not there.
        """
        grid.work_record()  # raises where other processes could not train it
        size = RunSize(grid.num_threads or 1, self.num_processes)
        common: Any = {"size": size, "device": grid.device, "retries": self.retries}
        if self.executor == "ray":
            return RayExecutor(out, self.jobs, **common, options=self.options)
        if self.executor == "slurm":
            return SlurmExecutor(out, self.jobs, **common, options=self.options)
        return LocalExecutor(out, self.jobs, **common)
