"""Experiment trackers that receive the numbers of runs: TensorBoard, W&B, MLflow, Trackio."""

import io
import posixpath
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from contextvars import Context
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from filelock import FileLock

from powernorm.errors import InputError
from powernorm_lab.engine.isolation import own_generators


class Tracker(Protocol):
    """Receives the numbers of one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log finite numbers of a step by name."""
        ...

    def close(self) -> None:
        """Finish the run."""
        ...


class _TensorBoard:
    """Event files in the run's folder `tensorboard`."""

    def __init__(self, folder: Path, last_step: int | None) -> None:
        _imported("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        first = None if last_step is None else last_step + 1  # hides older events of these steps
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases, whose files are in the run's folder `wandb`."""

    def __init__(self, folder: Path, last_step: int | None) -> None:
        wandb = _imported("wandb")
        self._run = wandb.init(
            project=_project(folder),
            name=folder.name,
            id=_kept_id(folder, "wandb", last_step),
            dir=str(folder),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow at `MLFLOW_TRACKING_URI`."""

    def __init__(self, folder: Path, last_step: int | None) -> None:
        self._mlflow = _imported("mlflow")
        project, tag = _project(folder), _kept_id(folder, "mlflow", last_step)
        # Workers that create a database at the same time would corrupt it.
        with FileLock(folder.parent / ".mlflow.lock"):
            self._client = client = self._mlflow.MlflowClient()
            known = client.get_experiment_by_name(project)
            experiment = known.experiment_id if known else client.create_experiment(project)
        found = client.search_runs([experiment], f"tags.powernorm = '{tag}'")
        if not found:
            found = [client.create_run(experiment, None, {"powernorm": tag}, folder.name)]
        self._id = found[0].info.run_id
        client.update_run(self._id, "RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        entries = [metric(_plain(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, entries)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    """A run of Trackio at `TRACKIO_DIR`, `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL`."""

    def __init__(self, folder: Path, last_step: int | None) -> None:
        trackio = _imported("trackio")
        resume = "never" if last_step is None else "allow"
        # Trackio keeps one run for each context and prints; a new context leaves the caller's run.
        with redirect_stdout(io.StringIO()):
            self._run = Context().run(
                trackio.init, project=_project(folder), name=folder.name, resume=resume, embed=False
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()


TRACKERS: Final[Mapping[str, Callable[[Path, int | None], Tracker]]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
    "trackio": _Trackio,
}
"""Trackers by name: that of the package, as in `log_to`. Packages are imported when a run logs."""


def _check_installed(name: str) -> None:
    spec = find_spec(name)
    # Trackers create folders of their names, which Python treats as namespace packages.
    if spec is None or spec.origin is None:
        raise InputError(f"the tracker {name} needs the package {name}: pip install {name}")


def _imported(name: str) -> Any:
    """Import the package of a tracker.

    Raises:
        InputError: the package is missing.
    """
    _check_installed(name)
    return import_module(name)


def _project(folder: Path) -> str:
    """Return the name of the comparison's folder, in characters that all trackers accept."""
    return re.sub(r"[^\w. -]", "-", folder.absolute().parent.name)[:128] or "powernorm"


def _plain(name: str) -> str:
    """Return the name of a number in MLflow's format: letters, digits and a relative path."""
    return posixpath.normpath(re.sub(r"[^/\w. -]", "_", name)).lstrip("./") or "_"


def _kept_id(folder: Path, name: str, last_step: int | None) -> str:
    """Return the run's id in a tracker: the stored one if the run resumes, else a new one."""
    path = folder / f"{name}.id"
    if last_step is None or not path.is_file():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def check_trackers(names: Sequence[str]) -> None:
    """Check the names of trackers, and that their packages are installed, without importing them.

    Raises:
        InputError: a name is unknown (the message lists the known ones), or a package is missing.
    """
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"there is no tracker {name!r}: choose among {', '.join(TRACKERS)}")
        _check_installed(name)


class Trackers:
    """The trackers of a run, created with the first number.

    Args:
        names: names in `TRACKERS`.
        folder: folder of the run.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = names
        self._folder = folder
        self._opened: list[Tracker] | None = None

    def log(self, values: Mapping[str, Any], *, step: int, last_step: int | None) -> None:
        """Log numbers of a step.

        Args:
            values: numbers by name.
            step: number of the step.
            last_step: step of the checkpoint from which the run has resumed; None without one.
        """
        if self._opened is None:
            self._opened = []
            with own_generators():  # a package may draw random numbers when it is imported
                for name in self._names:
                    self._opened.append(TRACKERS[name](self._folder, last_step))
        for tracker in self._opened:
            tracker.log(step, values)

    def close(self) -> None:
        """Close all trackers."""
        opened, self._opened = self._opened or [], None
        with ExitStack() as closing:  # closes the others if one raises an error
            for tracker in opened:
                closing.callback(tracker.close)
