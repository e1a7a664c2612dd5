"""The position of a run in its batches, for resuming."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.engine.state import (
    Stateful,
    random_states,
    restore,
    seed_everything,
    set_random_states,
    state_of,
)

_Batch = TypeVar("_Batch")
_END: Final = object()


class Position:
    """The number of batches taken in this pass, and the random states at its beginning.

    Batches have their own stream of random numbers. Draws of the training in between, such as those
    of dropout, do not affect it, so that skipping the batches already seen restores the stream.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._start: dict[str, Any] | None = None
        self._numbers: dict[str, Any] | None = None
        self._loader_state: Any = None
        self._source: Any = None
        self._can_draw = True
        self._generators: dict[str, torch.Generator] = {}
        self._generator_states: dict[str, Tensor] = {}

    @property
    def has_position(self) -> bool:
        """Whether a checkpoint has set the position."""
        return self._start is not None or self._loader_state is not None

    @property
    def taken(self) -> int:
        """Number of batches taken in this pass."""
        return self._taken

    def use(self, batches: Iterable[Any], tracked: Mapping[str, torch.Generator]) -> None:
        """Set the batches to iterate, and the generators that they may draw from."""
        self._source = batches if isinstance(batches, Stateful) else None
        self._can_draw = not isinstance(batches, Sequence)  # a sequence holds its items already
        found: dict[str, Any] = {f"tracked.{name}": one for name, one in tracked.items()}
        found["loader"] = getattr(batches, "generator", None)
        found["sampler"] = getattr(getattr(batches, "sampler", None), "generator", None)
        self._generators = {k: g for k, g in found.items() if isinstance(g, torch.Generator)}

    def begin(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the batches of a new pass."""
        self._taken, self._loader_state = 0, None
        with self._own_random_numbers():
            numbers = random_states() if self._can_draw else None
            self._start = {"random": numbers, "generators": self._own_states()}
            rest = iter(batches)
        yield from self._counted(rest)

    def resume(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the remaining batches of the pass in which the checkpoint was written."""
        if self._source is not None and self._loader_state is not None:
            self._set_own_states(self._generator_states)
            with self._own_random_numbers():
                restore("the batches", self._source, self._loader_state)
                rest = iter(batches)
        else:
            rest = self._skipped(batches)
        yield from self._counted(rest)

    def _skipped(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        assert self._start is not None
        self._set_own_states(self._start["generators"])
        self._numbers = self._start["random"]
        with self._own_random_numbers():
            rest = iter(batches)
            for _ in range(self._taken):
                if next(rest, _END) is _END:
                    raise InputError(
                        f"there are fewer than the {self._taken} batches that the run has seen: "
                        "give the same data as before, or use --force to start over"
                    )
        self._set_own_states(self._generator_states)
        return rest

    def _counted(self, rest: Iterator[_Batch]) -> Iterator[_Batch]:
        while True:
            with self._own_random_numbers():
                batch = next(rest, _END)
            if batch is _END:
                return
            self._taken += 1
            yield batch  # type: ignore[misc]

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Let batches draw from their own stream; the first one seeds it from the training's."""
        if not self._can_draw:
            yield
            return
        training = random_states()
        if self._numbers is None:
            seed_everything(int(torch.randint(2**62, ())))
        else:
            set_random_states(self._numbers)
        try:
            yield
        finally:
            self._numbers = random_states()
            set_random_states(training)

    def _own_states(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def _set_own_states(self, states: Mapping[str, Tensor]) -> None:
        for name, state in states.items():
            if name in self._generators:
                self._generators[name].set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position for a checkpoint."""
        return {
            "taken": self._taken,
            "start": self._start,
            "numbers": self._numbers,
            "generators": self._own_states(),
            "loader": None if self._source is None else state_of("the batches", self._source),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position from a checkpoint."""
        self._taken, self._start = int(state["taken"]), state["start"]
        self._numbers, self._generator_states = state["numbers"], state["generators"]
        self._loader_state = state["loader"]
        start = self._start or {"random": None, "generators": {}}
        if not isinstance(start["generators"], dict) or not isinstance(
            self._generator_states, dict
        ):
            raise TypeError("the states of its generators are not a dict")
        before = random_states()
        for numbers in (start["random"], self._numbers):
            if numbers is not None:
                set_random_states(numbers)  # raises if they are not valid states
        set_random_states(before)
