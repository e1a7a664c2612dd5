"""Memory of earlier batches for models whose batches continue the same text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, ...]
"""Position of each row of a batch in the text."""


@dataclass(slots=True)
class _Lane:
    """A sequence of batches whose rows continue each other."""

    before: Place
    """Start of the latest batch."""
    seen: tuple[Tensor, ...] | None
    """Memory of each layer before the latest batch."""
    after: Place | None = None
    """Start of the next batch."""
    kept: tuple[Tensor, ...] | None = None
    """Memory of each layer after the latest batch."""


class StreamMemory:
    """Keeps the inputs of attention layers, and returns them for the batch that continues the text.

    `starts` are the positions of a batch's rows in the text. If they equal the ends of an earlier
    batch's rows, the batch continues with its memory; any other batch starts without a memory, such
    as the first one of a text or epoch. Repeating a batch finds the same memory.

    Args:
        length: number of positions kept for each row; 0 keeps none.
        num_lanes: number of interleaved sequences of batches, such as the micro-batches of an
            update.
    """

    def __init__(self, length: int, num_lanes: int = 1) -> None:
        self.length = length
        self._num_lanes = num_lanes
        self._lanes: list[_Lane] = []

    def recall(self, starts: Tensor) -> tuple[Tensor, ...] | None:
        """Return the memory of each layer before a batch; None if the batch continues no other.

        Args:
            starts: position of each row in the text, int64, (batch,).

        Returns:
            For each layer (batch, positions, features), detached.
        """
        place = tuple(starts.tolist())
        lane = self._lane_of(place)
        # The last entry is the lane used last.
        self._lanes.append(lane)
        del self._lanes[: -self._num_lanes]
        return lane.seen

    def keep(self, num_positions: int, contexts: Sequence[Tensor] | None) -> None:
        """Keep the last positions of the contexts of the batch of the latest `recall`.

        Args:
            num_positions: length of the batch.
            contexts: inputs of each layer's attention, including the memory before the batch,
                (batch, positions, features); None if the text does not continue.
        """
        lane = self._lanes[-1]
        if contexts is None or not self.length:
            lane.after = lane.kept = None
            return
        lane.after = tuple(start + num_positions for start in lane.before)
        # A copy, because a view would keep the whole context in memory.
        lane.kept = tuple(x[:, -self.length :].detach().clone() for x in contexts)

    def state(self) -> list[dict[str, Tensor]]:
        """Return the memory for the next batches on the CPU: `starts` and `layers` of each lane.

        `layers` is (layers, batch, positions, features); both are empty if nothing is kept.
        """
        return [_lane_state(lane) for lane in self._lanes]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore the result of `state`, or of some of its rows."""
        self._lanes = [
            _Lane(before=(), seen=None, after=tuple(lane["starts"].tolist()), kept=_layers(lane))
            for lane in state
        ]

    def _lane_of(self, place: Place) -> _Lane:
        """Remove the lane of a batch from the list, or create one."""
        # The lane used last comes first: an older one may be left from an earlier pass.
        for index, lane in reversed(list(enumerate(self._lanes))):
            if lane.kept is not None and lane.after == place:
                del self._lanes[index]
                return _Lane(before=place, seen=tuple(map(_usable, lane.kept)))
            if lane.before == place:
                return self._lanes.pop(index)
        return _Lane(before=place, seen=None)


def _lane_state(lane: _Lane) -> dict[str, Tensor]:
    if lane.after is None or lane.kept is None:
        return {"starts": torch.empty(0, dtype=torch.long), "layers": torch.empty(0)}
    return {"starts": torch.tensor(lane.after), "layers": torch.stack(lane.kept).cpu()}


def _layers(lane: Mapping[str, Tensor]) -> tuple[Tensor, ...] | None:
    return tuple(lane["layers"].unbind()) if lane["starts"].numel() else None


def _usable(kept: Tensor) -> Tensor:
    """Return a tensor that autograd may save, even if it was created in inference mode."""
    if kept.is_inference() and not torch.is_inference_mode_enabled():
        return kept.clone()
    return kept


def merged_states(parts: Sequence[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Return the state over all processes.

    Args:
        parts: state of each process by rank; process r of n has the rows r, r + n, ….
    """
    return [_merged([*lanes]) for lanes in zip(*parts, strict=True)]


def own_state(state: Sequence[Mapping[str, Tensor]], rank: int, size: int) -> list[Any]:
    """Return the rows of one of `size` processes from the state over all processes."""
    return [
        {
            "starts": lane["starts"][rank::size],
            "layers": lane["layers"][:, rank::size] if lane["starts"].numel() else lane["layers"],
        }
        for lane in state
    ]


def _merged(lanes: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    filled = [lane for lane in lanes if lane["starts"].numel()]
    if len(filled) < 2:
        return filled[0] if filled else lanes[0]
    rows = sum(lane["starts"].numel() for lane in filled)
    first = filled[0]["layers"]
    starts = torch.empty(rows, dtype=torch.long)
    layers = first.new_empty(first.shape[0], rows, *first.shape[2:])
    # Processes without rows come last.
    for rank, lane in enumerate(filled):
        starts[rank :: len(lanes)] = lane["starts"]
        layers[:, rank :: len(lanes)] = lane["layers"]
    return {"starts": starts, "layers": layers}
