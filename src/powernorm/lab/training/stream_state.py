"""Keeps in the checkpoint what a model remembers of the text before the next batch."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from torch import Tensor

from powernorm.lab.engine.processes import gather, num_processes, rank
from powernorm.lab.models.stream_memory import merged_states, own_state


@runtime_checkable
class Remembering(Protocol):
    """A model that goes on from what it has seen in earlier batches."""

    def memory_state(self) -> list[dict[str, Tensor]]:
        """Return the memory of the training."""
        ...

    def load_memory_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `memory_state` returned."""
        ...


class StreamState(pl.Callback):
    """Writes the memory of all rows of a batch, and gives each process its own again.

    So a run may go on with another number of processes than it had.

    Args:
        model: has the memory.
    """

    def __init__(self, model: Remembering) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of all processes; every one of them calls it."""
        return {"lanes": merged_states(gather(self._model.memory_state()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._model.load_memory_state(own_state(state_dict["lanes"], rank(), num_processes()))
