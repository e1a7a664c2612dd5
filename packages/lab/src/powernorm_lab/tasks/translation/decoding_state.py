"""What a decoder keeps between two steps of a search: keys and values, and who may see them.

The tokens of all hypotheses of a sentence are kept side by side and never move. What changes when
the search picks hypotheses is which of the kept tokens each of them consists of: a small boolean
table. So no step copies keys and values, and the beam of a sentence is to the decoder's modules
what the length of a sequence is in training.
"""

import torch
from torch import Tensor

_FIRST_STEPS = 16
"""Steps for which there is room at first; the room doubles when it is full."""


class LayerState:
    """Keys and values of one decoder layer.

    Args:
        memory: keys and values of the source, (batch, heads, source length, features of a head).
    """

    def __init__(self, memory: tuple[Tensor, Tensor]) -> None:
        self.memory = memory
        self._kept: tuple[Tensor, Tensor] | None = None
        self._used = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of a step, (batch, heads, beam, features of a head); return all so far."""
        begin, self._used = self._used, self._used + keys.shape[2]
        kept = self._kept
        if kept is None or kept[0].shape[2] < self._used:
            room = max(2 * begin, _FIRST_STEPS * keys.shape[2])
            kept = (_moved(kept, 0, keys, begin, room), _moved(kept, 1, values, begin, room))
            self._kept = kept
        kept[0][:, :, begin : self._used] = keys
        kept[1][:, :, begin : self._used] = values
        return kept[0][:, :, : self._used], kept[1][:, :, : self._used]

    def select(self, rows: Tensor) -> None:
        """Keep these sentences only."""
        self.memory = (self.memory[0].index_select(0, rows), self.memory[1].index_select(0, rows))
        if self._kept is not None:
            keys, values = self._kept
            self._kept = (keys.index_select(0, rows), values.index_select(0, rows))


def _moved(
    kept: tuple[Tensor, Tensor] | None, part: int, like: Tensor, used: int, room: int
) -> Tensor:
    """Return room for `room` tokens, the used ones in it."""
    batch, heads, _, size = like.shape
    moved = like.new_empty(batch, heads, room, size)
    if kept is not None:
        moved[:, :, :used] = kept[part][:, :, :used]
    return moved


class DecodingState:
    """What a decoder knows of the hypotheses of a batch of sentences.

    Args:
        layers: keys and values, a state a layer.
        memory_allowed: where the attention to the source may look, (batch, 1, 1, source length);
            None is everywhere.
        batch: number of sentences.
        beam_size: hypotheses of a sentence.
        device: of the decoder.
    """

    def __init__(
        self,
        layers: list[LayerState],
        memory_allowed: Tensor | None,
        *,
        batch: int,
        beam_size: int,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.memory_allowed = memory_allowed
        self._itself = torch.eye(beam_size, dtype=torch.bool, device=device)
        self._visible = self._itself.new_empty(batch, beam_size, 0)

    def begin_step(self) -> Tensor:
        """Return what each hypothesis sees in the coming step, (batch, 1, beam, kept tokens)."""
        own = self._itself.expand(self._visible.shape[0], -1, -1)
        self._visible = torch.cat((self._visible, own), dim=-1)
        return self._visible[:, None]

    def continue_from(self, origins: Tensor) -> None:
        """Let hypothesis j of a sentence go on where `origins[:, j]` was, (batch, beam)."""
        index = origins[..., None].expand(-1, -1, self._visible.shape[-1])
        self._visible = self._visible.gather(1, index)

    def select(self, rows: Tensor) -> None:
        """Keep these sentences only."""
        self._visible = self._visible.index_select(0, rows)
        if self.memory_allowed is not None:
            self.memory_allowed = self.memory_allowed.index_select(0, rows)
        for layer in self.layers:
            layer.select(rows)
