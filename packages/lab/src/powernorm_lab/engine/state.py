"""State of a run: random generators, tracked objects, and the checkpoint that holds them."""

import random
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from powernorm.checksums import load_sealed, save_sealed
from powernorm.errors import InputError
from powernorm_lab.engine.distribution import is_divided
from powernorm_lab.engine.folders import check_owner, last_checkpoint

FORMAT: Final = 1
FIX: Final = "remove the run's folder to train the run again"
_PLAIN: Final = (Tensor, int, float, complex, str, bytes, bool, type(None))
_MAPPINGS: Final = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: Final = (list, tuple, set, torch.Size)
_TOKENS: Final = (torch.dtype, torch.device)


@runtime_checkable
class Stateful(Protocol):
    """Protocol of objects that a checkpoint can hold, such as modules and optimizers."""

    def state_dict(self) -> Any:
        """Return the state that the object needs to resume."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Restore the state that `state_dict` returned."""
        ...


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators of this process."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, numbers, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        # int64, because not every version of torch can store uint32.
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states that `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, numbers, gauss))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        known = states["cuda"][: torch.cuda.device_count()]  # there may be fewer GPUs now
        torch.cuda.set_rng_state_all([state.cpu() for state in known])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def state_of(name: str, thing: Any) -> Any:
    """Return the state of a tracked object.

    Raises:
        InputError: it holds an object that a checkpoint cannot hold safely; the message names it.
    """
    state = thing.get_state() if isinstance(thing, torch.Generator) else thing.state_dict()
    problem = _unsafe(state, name)
    if problem is not None:
        raise InputError(
            f"the state of {name!r} cannot be stored in a checkpoint ({problem}): its state_dict "
            "may return only tensors, numbers, strings, lists and dicts"
        )
    return state


def restore(name: str, thing: Any, state: Any) -> None:
    """Restore the state of a tracked object from a checkpoint.

    Raises:
        InputError: the state does not fit, for example because the model has another shape.
    """
    try:
        if isinstance(thing, torch.Generator):
            thing.set_state(state)
        else:
            thing.load_state_dict(state)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{name!r} cannot load its state from the checkpoint ({type(error).__name__}: "
            f"{first_line}): build it as before, or use --force to start over"
        ) from error


def gradients_of(thing: Any) -> dict[str, Tensor]:
    """Return the gradients that a module has accumulated between two steps.

    Returns no gradients of a module with sharded weights, which accumulates within a step.
    """
    if not isinstance(thing, nn.Module) or is_divided(thing):
        return {}
    return {name: p.grad for name, p in thing.named_parameters() if p.grad is not None}


def restore_gradients(thing: Any, gradients: Mapping[str, Tensor]) -> None:
    """Restore the gradients that `gradients_of` returned."""
    if isinstance(thing, nn.Module) and not is_divided(thing):
        for name, parameter in thing.named_parameters():
            found = gradients.get(name)
            parameter.grad = None if found is None else found.to(parameter.device)


def write_checkpoint(file: BinaryIO, content: Mapping[str, Any]) -> None:
    """Write a checkpoint with its checksum.

    Raises:
        OSError: the file cannot be written.
    """
    save_sealed({"format": FORMAT, **content}, file)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint that `write_checkpoint` wrote.

    Raises:
        InputError: the file is damaged, is not a checkpoint, or belongs to another run.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns before it raises
            content = load_sealed(path, FIX)
    except InputError:
        raise
    except Exception as error:  # torch may raise any error for other files
        reason = f"{type(error).__name__} {str(error).partition(chr(10))[0].partition('. ')[0]}"
        raise InputError(f"{path} is not a checkpoint of a run ({reason}): {FIX}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "states" not in content:
        raise InputError(f"{path} is not a checkpoint of a run (it holds something else): {FIX}")
    if not isinstance(content["states"], dict) or not isinstance(content.get("run"), dict | None):
        raise InputError(f"{path} is not a checkpoint of a run (it holds something else): {FIX}")
    check_owner(path, content.get("run"))
    return content


def weights_in(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights of tracked modules in a checkpoint, by `module.weight`.

    Raises:
        InputError: as `read_checkpoint`, or it holds no such module.
    """
    states = read_checkpoint(path)["states"]
    missing = [name for name in names if name not in states]
    if missing:
        raise InputError(f"{path} holds {', '.join(states)}, not {missing[0]!r}: name one of these")
    return {f"{name}.{key}": value for name in names for key, value in states[name].items()}


def saved_states(folder: Path) -> dict[str, Any]:
    """Return the states of a run's tracked objects in its last checkpoint, by name.

    Args:
        folder: folder of the run, or one of its checkpoints, such as `checkpoints/early.ckpt`.

    Raises:
        InputError: the checkpoint is missing or damaged.
    """
    path = folder if folder.is_file() else last_checkpoint(folder)
    if not path.exists():
        raise InputError(f"{folder} has no checkpoint: give the folder of a run that tracks states")
    states: dict[str, Any] = read_checkpoint(path)["states"]
    return states


def _unsafe(value: Any, where: str) -> str | None:
    """Return the first object that `torch.load` would refuse, with its place; None without one."""
    kind = type(value)
    if kind in _MAPPINGS:
        pairs = ((item, f"{where}[{key!r}]") for key, item in value.items())
        keys = next((key for key in value if not isinstance(key, str | int | float | tuple)), None)
        if keys is not None:
            return f"a key of {where} is a {type(keys).__name__}"
        return next((found for item, at in pairs if (found := _unsafe(item, at))), None)
    if kind in _SEQUENCES:
        items = ((item, f"{where}[{index}]") for index, item in enumerate(value))
        return next((found for item, at in items if (found := _unsafe(item, at))), None)
    if kind in _PLAIN or kind in _TOKENS or kind is torch.nn.Parameter:
        return None
    return f"{where} is a {kind.__module__}.{kind.__qualname__}"
