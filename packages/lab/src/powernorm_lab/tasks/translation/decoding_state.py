"""Cache of a decoder between two steps of a search: keys, values and an attention mask.

The tokens of all hypotheses of a sentence are stored in one sequence and are never moved. When the
search selects hypotheses, only a boolean mask changes: the tokens that each hypothesis consists of.
No step copies keys and values, and for the decoder's modules the beam of a sentence has the place
of a sequence's length in training.
"""

import torch
from torch import Tensor

_FIRST_STEPS = 16
"""Initial capacity in steps; the capacity doubles when it is full."""


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
        """Append keys and values, (batch, heads, beam, features of a head); return all."""
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
        """Keep only these sentences."""
        self.memory = (self.memory[0].index_select(0, rows), self.memory[1].index_select(0, rows))
        if self._kept is not None:
            keys, values = self._kept
            self._kept = (keys.index_select(0, rows), values.index_select(0, rows))


def _moved(
    kept: tuple[Tensor, Tensor] | None, part: int, like: Tensor, used: int, room: int
) -> Tensor:
    """Return a buffer for `room` tokens with the used ones copied into it."""
    batch, heads, _, size = like.shape
    moved = like.new_empty(batch, heads, room, size)
    if kept is not None:
        moved[:, :, :used] = kept[part][:, :, :used]
    return moved


class DecodingState:
    """The state of a decoder for the hypotheses of a batch of sentences.

    Args:
        layers: keys and values of each layer.
        memory_allowed: mask of the attention to the source, True = attend, (batch, 1, 1, source
            length); None allows all positions.
        batch: number of sentences.
        beam_size: hypotheses of a sentence.
        device: device of the decoder.
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
        """Return the attention mask of the next step, (batch, 1, beam, stored tokens)."""
        own = self._itself.expand(self._visible.shape[0], -1, -1)
        self._visible = torch.cat((self._visible, own), dim=-1)
        return self._visible[:, None]

    def continue_from(self, origins: Tensor) -> None:
        """Make hypothesis j of a sentence a continuation of `origins[:, j]`, (batch, beam)."""
        index = origins[..., None].expand(-1, -1, self._visible.shape[-1])
        self._visible = self._visible.gather(1, index)

    def select(self, rows: Tensor) -> None:
        """Keep only these sentences."""
        self._visible = self._visible.index_select(0, rows)
        if self.memory_allowed is not None:
            self.memory_allowed = self.memory_allowed.index_select(0, rows)
        for layer in self.layers:
            layer.select(rows)
