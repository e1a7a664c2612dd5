"""Experiment trackers: what a run logs, shown in a program of somebody else."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from powernorm.errors import InputError


class Tracker(Protocol):
    """Shows the numbers of one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show finite numbers of a step by name."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class _TensorBoard:
    """Event files in the run's folder `tensorboard`."""

    def __init__(self, folder: Path, first_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


TRACKERS: Final[Mapping[str, Callable[[Path, int | None], Tracker]]] = {"tensorboard": _TensorBoard}
"""By the name that `log_to` takes. Each is imported when a run asks for it."""


def check_trackers(names: Sequence[str]) -> None:
    """Check the names of trackers.

    Raises:
        InputError: one is unknown; lists the known ones.
    """
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"there is no tracker {name!r}: choose among {', '.join(TRACKERS)}")


class Trackers:
    """Several trackers of a run, made at the first number.

    Args:
        names: of `TRACKERS`.
        folder: of the run.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = names
        self._folder = folder
        self._opened: list[Tracker] | None = None

    def log(self, values: Mapping[str, Any], *, step: int, last_step: int | None) -> None:
        """Show numbers of a step.

        Args:
            values: by name.
            step: number of the step.
            last_step: step of the checkpoint from which the run has resumed; None without one.
        """
        if self._opened is None:
            self._opened = [TRACKERS[name](self._folder, last_step) for name in self._names]
        for tracker in self._opened:
            tracker.log(step, values)

    def close(self) -> None:
        """Finish all."""
        opened, self._opened = self._opened or [], None
        for tracker in opened:
            tracker.close()
