"""Checkpoints from which a run goes on exactly as if it had not stopped."""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from powernorm.checksums import load_sealed, save_sealed
from powernorm.errors import InputError
from powernorm.files import replacing
from powernorm.lab.engine.averaging import Snapshots
from powernorm.lab.engine.folders import LAST, check_owner, owner_of
from powernorm.lab.engine.leases import Lease
from powernorm.lab.engine.processes import is_main
from powernorm.norms.buffers import is_optional_key

BEST: Final = "best.ckpt"
EARLY: Final = "early.ckpt"
FORMAT: Final = 2
CONTENT: Final = frozenset(
    ("format", "step", "weights", "optimizer", "scaler", "random", "history", "memory", "is_over")
)
"""Names of what a checkpoint holds: the updates that are done, the model's parameters and buffers,
the states of optimizer and GradScaler, the random states of every process, what the recorder and a
model with a memory go on from, and whether the run was to end with this update."""
_FIX: Final = "remove the run's folder to train it anew"


class Checkpoints:
    """Writes a run's checkpoints, each renamed into place: the one before it stays whole till then.

    Args:
        folder: made where it is missing.
        snapshots: of the weights.
        lease: of the run; None in processes that write nothing.
    """

    def __init__(self, folder: Path, snapshots: Snapshots, lease: Lease | None) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self._lease = lease

    def forget_after(self, step: int) -> None:
        """Delete the weights that were kept after the checkpoint from which a run goes on."""
        if is_main():
            self._snapshots.forget_after(step)

    def save(
        self, content: Mapping[str, Any], *, validated: bool = False, is_best: bool = False
    ) -> None:
        """Write last.ckpt, after a validation also what is kept of the best and latest ones.

        Args:
            content: see `CONTENT`.
            validated: whether the weights are those of a validation.
            is_best: whether it was the best so far.

        Raises:
            InputError: the folder cannot be written.
        """
        if not is_main():
            return
        # It takes its place at the end, so that it never is ahead of the rest.
        with _writing(self._folder), ExitStack() as leased, replacing(self._folder / LAST) as file:
            save_sealed(self._named(content), file)
            leased.enter_context(self._leased())
            if validated:
                self._snapshots.keep(content["step"], content["weights"])
            if is_best:
                file.seek(0)
                with replacing(self._folder / BEST) as copy:
                    shutil.copyfileobj(file, copy)

    def save_early(self, content: Mapping[str, Any]) -> None:
        """Write early.ckpt, for a diagnosis at that time.

        Raises:
            InputError: the folder cannot be written.
        """
        if not is_main():
            return
        with _writing(self._folder), replacing(self._folder / EARLY) as file:
            save_sealed(self._named(content), file)

    def _named(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"format": FORMAT, "run": owner_of(self._folder.parent), **content}

    def _leased(self) -> AbstractContextManager[None]:
        return nullcontext() if self._lease is None else self._lease.writing()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make the folder, and turn a full disk and its like into an error that says what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"{folder} cannot be written ({reason}): make room, then go on with --resume; the "
            "checkpoint before this one is whole"
        ) from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint, by the names of `CONTENT`.

    Raises:
        InputError: the file is damaged, is none of ours, or is another run's than its folder.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about a file that it refuses next
            content = load_sealed(path, _FIX)
        if set(content) >= CONTENT:
            check_owner(path, content.get("run"))
            return dict(content)
        reason = "it holds something else"
    except InputError:
        raise
    except Exception as error:  # whatever a damaged file makes torch raise
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__} {first_line.partition('. ')[0]}"
    raise InputError(f"{path} is not a checkpoint of a run ({reason}): {_FIX}")


def check_weights(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Check that the weights of a file are those of a model, by names and shapes.

    Raises:
        InputError: they are of another one; the message names a weight.
    """
    expected = model.state_dict()
    names = sorted(name for name in expected.keys() ^ weights.keys() if not is_optional_key(name))
    problem = f"{names[0]} is in one of them only" if names else ""
    for name in expected.keys() & weights.keys():
        given, wanted = tuple(weights[name].shape), tuple(expected[name].shape)
        if given != wanted:
            problem = f"{name} is {given} there and {wanted} here"
    if problem:
        raise InputError(
            f"{path} holds the weights of another model ({problem}): remove the run's folder to "
            "train it anew"
        )
