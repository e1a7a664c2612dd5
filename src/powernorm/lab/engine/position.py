"""The place of a run in its batches, from which another process goes on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from powernorm.errors import InputError
from powernorm.lab.engine.state import (
    Stateful,
    random_states,
    restore,
    set_random_states,
    state_of,
)

_Batch = TypeVar("_Batch")
_END: Final = object()


class Position:
    """The place in the batches: how many of this pass were taken, and from which random state."""

    def __init__(self) -> None:
        self._taken = 0
        self._start: dict[str, Any] | None = None
        self._loader_state: Any = None
        self._source: Any = None

    @property
    def has_position(self) -> bool:
        """Whether a checkpoint said where to go on."""
        return self._start is not None or self._loader_state is not None

    def begin(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the batches of a pass from its beginning."""
        self._taken, self._start = 0, random_states()
        self._loader_state = None
        self._source = batches if isinstance(batches, Stateful) else None
        for batch in batches:
            self._taken += 1
            yield batch

    def go_on(
        self, batches: Iterable[_Batch], set_random_states_of_checkpoint: Callable[[], None]
    ) -> Iterator[_Batch]:
        """Yield the rest of the pass that a checkpoint was written in."""
        self._source = batches if isinstance(batches, Stateful) else None
        if self._source is not None and self._loader_state is not None:
            restore("the batches", self._source, self._loader_state)
            set_random_states_of_checkpoint()
            rest = iter(batches)
        else:
            assert self._start is not None
            set_random_states(self._start)
            rest = iter(batches)
            for _ in range(self._taken):
                if next(rest, _END) is _END:
                    raise InputError(
                        f"there are fewer than {self._taken} batches, which the run had seen: give "
                        "the same data as before, or use --force to begin anew"
                    )
            set_random_states_of_checkpoint()
        for batch in rest:
            self._taken += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place for a checkpoint."""
        loader = None if self._source is None else state_of("the batches", self._source)
        return {"taken": self._taken, "start": self._start, "loader": loader}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the place from a checkpoint."""
        self._taken, self._start = int(state["taken"]), state["start"]
        self._loader_state = state["loader"]
