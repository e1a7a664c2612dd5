"""State of a run: random generators, tracked objects, and the checkpoint that holds them."""

import random
import shutil
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from powernorm.checksums import load_sealed, save_sealed
from powernorm.errors import InputError
from powernorm.files import replacing
from powernorm_lab.engine.distribution import (
    is_divided,
    load_state,
    load_weights,
    optimized,
    whole_state,
    whole_weights,
)
from powernorm_lab.engine.folders import LAST, check_owner, last_checkpoint, owner_of
from powernorm_lab.engine.logs import Writing
from powernorm_lab.engine.processes import gather, is_main, num_processes, on_main, rank
from powernorm_lab.runs import CHECKPOINTS_FOLDER

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


def saved_states(folder: str | Path) -> dict[str, Any]:
    """Return the states of a run's tracked objects in its last checkpoint, by name.

    Args:
        folder: folder of the run, or one of its checkpoints, such as `checkpoints/early.ckpt`.

    Raises:
        InputError: the checkpoint is missing or damaged.
    """
    place = Path(folder)
    path = place if place.is_file() else last_checkpoint(place)
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


_WRONG: Final = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)
"""Errors that values of unexpected types in a checkpoint can raise."""


class Tracked:
    """Objects by name, whose states are saved to last.ckpt and restored from it.

    Args:
        folder: folder of the run.
        writing: context in which its files are written.
    """

    def __init__(self, folder: Path, writing: Writing) -> None:
        self._folder = folder
        self._writing = writing
        self._things: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._things)

    @cached_property
    def checkpoint(self) -> dict[str, Any] | None:
        """Checkpoint from which the run resumes, None without one; all processes must read it."""
        path = last_checkpoint(self._folder)
        return on_main(lambda: read_checkpoint(path) if path.exists() else None)

    @property
    def step(self) -> int | None:
        """Number of steps done at the checkpoint; None without one."""
        if self.checkpoint is None:
            return None
        with self.naming():
            return int(self.checkpoint["step"])

    def add(self, name: str, thing: Any) -> None:
        """Track an object, and restore its state from the checkpoint if there is one.

        Raises:
            InputError: the object has no state, the name is taken, or the checkpoint does not fit.
        """
        if not isinstance(thing, Stateful | torch.Generator):
            raise InputError(
                f"run.track({name}=…) got a {type(thing).__name__}, which has no state_dict "
                "and load_state_dict: leave it out, or add these two methods"
            )
        if name in self._things:
            raise InputError(f"run.track({name}=…) was called twice: give each its own name")
        self._things[name] = thing
        if self.checkpoint is None:
            return
        with self.naming():
            states = self.checkpoint["states"]
            if name not in states:
                raise InputError(
                    f"the checkpoint of {self._folder} holds {', '.join(states)} and no {name!r}: "
                    "track the same objects as before, or use --force to start over"
                )
            restore(name, self._kept(thing), states[name])
            restore_gradients(thing, self.checkpoint["gradients"].get(name, {}))

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Add the checkpoint's path to errors of reading its contents.

        Raises:
            InputError: its contents were not written by `save`, or do not fit.
        """
        path = last_checkpoint(self._folder)
        try:
            yield
        except InputError as error:
            if str(self._folder) in str(error):
                raise
            raise InputError(f"{path}: {error}") from error
        except torch.OutOfMemoryError:
            raise
        except _WRONG as error:
            reason = f"{type(error).__name__} {str(error).partition(chr(10))[0]}"
            raise InputError(f"{path} is not a checkpoint of this run ({reason}): {FIX}") from error

    def check_complete(self) -> None:
        """Raise an InputError if the checkpoint has states of objects that are not tracked."""
        states = self.checkpoint["states"] if self.checkpoint is not None else {}
        missing = states.keys() - self._things.keys()
        if missing:
            raise InputError(
                f"the checkpoint of {self._folder} also holds {', '.join(sorted(missing))}: track "
                "the same objects as before, or use --force to start over"
            )

    def set_random_states(self) -> None:
        """Restore the generators of this process from the checkpoint.

        If the number of processes has changed, each keeps its current generators.
        """
        if self.checkpoint is None:
            return
        with self.naming():
            states = self.checkpoint["random"]
            if len(states) == num_processes():
                set_random_states(states[rank()])

    def save(self, content: Mapping[str, Any], copies: Sequence[str] = ()) -> None:
        """Write last.ckpt: all states, the generators of every process, and `content`.

        Args:
            content: further entries of the checkpoint.
            copies: names of copies of the file.

        Raises:
            InputError: the file cannot be written, or a state cannot be stored.
        """
        states = {name: state_of(name, self._kept(thing)) for name, thing in self._things.items()}
        gradients = {name: gradients_of(thing) for name, thing in self._things.items()}
        # All processes take part in gathering; the first one writes.
        random = gather(random_states())
        whole = {**content, "states": states, "gradients": gradients, "random": random}
        if is_main():
            self._put_in_place(whole, copies)

    def modules(self) -> dict[str, nn.Module]:
        """Return the tracked modules by name."""
        return {n: thing for n, thing in self._things.items() if isinstance(thing, nn.Module)}

    def generators(self) -> dict[str, torch.Generator]:
        """Return the tracked generators by name."""
        return {n: one for n, one in self._things.items() if isinstance(one, torch.Generator)}

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the tracked modules, by module and name."""
        return {
            f"{name}.{key}": value
            for name, module in self.modules().items()
            for key, value in whole_weights(module).items()
        }

    def load_weights(
        self, weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module] | None = None
    ) -> None:
        """Load the result of `weights` into the tracked modules, or into others by their names."""
        for name, module in (modules or self.modules()).items():
            prefix = f"{name}."
            own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            load_weights(module, own)

    def _kept(self, thing: Any) -> Any:
        """Return an object whose state is whole, also for modules with sharded weights."""
        if isinstance(thing, nn.Module) and is_divided(thing):
            return _WholeModule(thing)
        if isinstance(thing, torch.optim.Optimizer):
            own = set(map(id, optimized(thing)))
            for module in self.modules().values():
                if is_divided(module) and any(id(p) in own for p in module.parameters()):
                    return _WholeOptimizer(thing, module)
        return thing

    def _put_in_place(self, content: Mapping[str, Any], copies: Sequence[str]) -> None:
        folder = self._folder / CHECKPOINTS_FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as leased, replacing(folder / LAST) as file:
                write_checkpoint(file, {"run": owner_of(self._folder), **content})
                leased.enter_context(self._writing())
                for name in copies:
                    file.seek(0)
                    with replacing(folder / name) as copy:
                        shutil.copyfileobj(file, copy)
        except OSError as error:
            raise InputError(
                f"{folder} cannot be written ({error.strerror or error}): make room, then continue "
                "with --resume; the previous checkpoint is intact"
            ) from error


class _WholeModule:
    """A sharded module with whole weights as its state; every process must request it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return whole_weights(self._module)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_weights(self._module, state)


class _WholeOptimizer:
    """The optimizer of a sharded module with whole tensors as its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        self._optimizer = optimizer
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return whole_state(self._optimizer, self._module)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_state(self._optimizer, self._module, state)
