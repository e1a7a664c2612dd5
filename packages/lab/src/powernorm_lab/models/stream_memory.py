"""What a model keeps of earlier batches, for those that go on where one of them ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, ...]
"""Where in the text each row of a batch stands."""


@dataclass(slots=True)
class _Lane:
    """Batches that follow one another, row by row."""

    before: Place
    """Where the latest of them began."""
    seen: tuple[Tensor, ...] | None
    """What each layer kept of those before it."""
    after: Place | None = None
    """Where the next one has to begin."""
    kept: tuple[Tensor, ...] | None = None
    """What each layer kept, the latest included."""


class StreamMemory:
    """Keeps what the layers saw of a text, and gives it to the batch that continues the text.

    A batch says by `starts` where in the text its rows begin. Where that is the place at which the
    rows of an earlier batch ended, it goes on from there; any other batch begins without a memory,
    as the first of a text or of an epoch does. The same batch once more finds the same memory.

    Args:
        length: positions that are kept of each row; 0 keeps none.
        num_lanes: how many batches take turns, each with rows of its own, such as the micro-batches
            of an update.
    """

    def __init__(self, length: int, num_lanes: int = 1) -> None:
        self.length = length
        self._num_lanes = num_lanes
        self._lanes: list[_Lane] = []

    def recall(self, starts: Tensor) -> tuple[Tensor, ...] | None:
        """Return what each layer kept of the text before a batch; None where it begins anew.

        Args:
            starts: where in the text each row begins, int64, (batch,).

        Returns:
            Of each layer (batch, positions, features), without a graph.
        """
        place = tuple(starts.tolist())
        lane = self._lane_of(place)
        # The lane that was used last stands at the end.
        self._lanes.append(lane)
        del self._lanes[: -self._num_lanes]
        return lane.seen

    def keep(self, num_positions: int, contexts: Sequence[Tensor] | None) -> None:
        """Keep the end of what the layers saw in the batch of the latest `recall`.

        Args:
            num_positions: length of the batch.
            contexts: of each layer what its attention looked at, the memory before the batch
                included, (batch, positions, features); None where the text does not go on.
        """
        lane = self._lanes[-1]
        if contexts is None or not self.length:
            lane.after = lane.kept = None
            return
        lane.after = tuple(start + num_positions for start in lane.before)
        # A copy, or the whole context would stay alive.
        lane.kept = tuple(x[:, -self.length :].detach().clone() for x in contexts)

    def state(self) -> list[dict[str, Tensor]]:
        """Return what the next batches find, on the CPU: for each lane `starts` and `layers`.

        `layers` is (layers, batch, positions, features); both are empty where nothing is kept.
        """
        return [_lane_state(lane) for lane in self._lanes]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what `state` returned, or from some of its rows."""
        self._lanes = [
            _Lane(before=(), seen=None, after=tuple(lane["starts"].tolist()), kept=_layers(lane))
            for lane in state
        ]

    def _lane_of(self, place: Place) -> _Lane:
        """Take the lane that a batch belongs to out of the list, or make one."""
        # The one used last comes first: another may be left from an earlier pass over the text.
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
    """Return a tensor that autograd may save, also if a validation in inference mode made it."""
    if kept.is_inference() and not torch.is_inference_mode_enabled():
        return kept.clone()
    return kept


def merged_states(parts: Sequence[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Return the state of all processes together.

    Args:
        parts: of each process, by rank; process r has the rows r, r + processes, ….
    """
    return [_merged([*lanes]) for lanes in zip(*parts, strict=True)]


def own_state(state: Sequence[Mapping[str, Tensor]], rank: int, size: int) -> list[Any]:
    """Return the rows of one of `size` processes out of the state of all."""
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
    # Only the last processes may be without rows.
    for rank, lane in enumerate(filled):
        starts[rank :: len(lanes)] = lane["starts"]
        layers[:, rank :: len(lanes)] = lane["layers"]
    return {"starts": starts, "layers": layers}
