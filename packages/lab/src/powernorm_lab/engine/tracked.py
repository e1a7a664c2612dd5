"""Tracked objects of a run, and the checkpoint that holds their states."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

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
from powernorm_lab.engine.folders import LAST, last_checkpoint, owner_of
from powernorm_lab.engine.logs import Writing
from powernorm_lab.engine.processes import gather, is_main, num_processes, on_main, rank
from powernorm_lab.engine.state import (
    FIX,
    Stateful,
    gradients_of,
    random_states,
    read_checkpoint,
    restore,
    restore_gradients,
    set_random_states,
    state_of,
    write_checkpoint,
)
from powernorm_lab.runs import CHECKPOINTS_FOLDER

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
