"""A look at the first batches of a swapped model: is the mask there, and the right way round?"""

from __future__ import annotations

import warnings
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.surgery.selection import Side

_LOOKS: Final = 20
"""So many training calls are looked at; values are read, which waits for the device."""


class MaskWarning(UserWarning):
    """Padding probably counts in a batch's statistics."""


class Taker(NamedTuple):
    """Who takes a mask, under which name, on which side of an encoder-decoder."""

    module: nn.Module
    argument: str
    side: Side | None

    @property
    def key(self) -> str:
        """The same for each call of one taker."""
        return f"{self.side} {type(self.module).__name__} {self.argument}"


class MaskChecks:
    """Looks at masks until enough were seen, and warns of each thing once.

    Args:
        pad_id: the token that pads, None where the model does not say.
        starts_with_pad: the decoder's input begins with that token.
    """

    def __init__(self, pad_id: int | None, starts_with_pad: bool = False) -> None:
        self.pad_id = pad_id
        self.starts_with_pad = starts_with_pad
        self._looks_left = _LOOKS
        self._judged: set[str] = set()
        self._warned: set[str] = set()

    @classmethod
    def of(cls, model: nn.Module) -> MaskChecks:
        """The checks for a model, by what its `config` says about padding."""
        configs = (getattr(module, "config", None) for module in model.modules())
        config = next((config for config in configs if hasattr(config, "pad_token_id")), None)
        pad = getattr(config, "pad_token_id", None)
        # Where one token ends and pads, it also stands where nothing is padded.
        others = [getattr(config, f"{kind}_token_id", None) for kind in ("eos", "bos", "sep")]
        known = isinstance(pad, int) and not any(_holds(other, pad) for other in others)
        starts = pad is not None and getattr(config, "decoder_start_token_id", None) == pad
        return cls(pad if known else None, starts)

    def look(self, taker: Taker, data: Tensor, mask: Tensor | None) -> None:
        """Judge one training call of a module.

        Args:
            taker: was called.
            data: tokens (batch, length) or vectors (batch, length, features).
            mask: True = padding, or None where the call had none.

        Raises:
            InputError: the mask is the wrong way round.
        """
        if self._looks_left <= 0 or data.is_meta or (mask is not None and mask.is_meta):
            return
        self._looks_left -= 1
        with torch.no_grad():
            pads = self._pads(data, taker.side)
            if mask is None:
                self._look_at_missing(taker, pads)
            elif taker.key not in self._judged:
                self._judged.add(taker.key)
                self._look_at_rows(taker.argument, mask)
                if pads is not None and pads.shape == mask.shape:
                    _look_at_direction(taker.argument, pads, mask)

    def _pads(self, data: Tensor, side: Side | None) -> Tensor | None:
        """Positions that look like padding, (batch, length)."""
        if data.ndim == 3:
            return _run_from_the_end((data == 0).all(dim=-1))
        if data.is_floating_point() or self.pad_id is None:
            return None
        pads = data == self.pad_id
        if self.starts_with_pad and side == "decoder":
            pads[:, :1] = False
        return _run_from_the_end(pads) | _run_from_the_end(pads.flip(1)).flip(1)

    def _look_at_missing(self, taker: Taker, pads: Tensor | None) -> None:
        if pads is None or not bool(pads.any()) or bool(pads.all()):
            return
        self._warn(
            "missing",
            f"{type(taker.module).__name__} was called in training without {taker.argument}, but "
            f"{int(pads.sum())} of {pads.numel()} positions look like padding: they count in the "
            f"statistics of the swapped norms. Pass {taker.argument}",
        )

    def _look_at_rows(self, argument: str, mask: Tensor) -> None:
        empty = mask.all(dim=1)
        if bool(empty.any()) and not bool(empty.all()):
            self._warn(
                "rows",
                f"{argument} marks {int(empty.sum())} of {empty.numel()} rows as nothing but "
                "padding: is it the right way round?",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, MaskWarning, stacklevel=2)


def _look_at_direction(argument: str, pads: Tensor, mask: Tensor) -> None:
    if not bool(mask.any()):
        return
    counted, left_out = int((pads & ~mask).sum()), int((pads & mask).sum())
    # Tokens that are drawn at random may hold the padding's by chance, hence most of them.
    if counted > left_out and 2 * counted > int((~mask).sum()):
        raise InputError(
            f"{argument} is the wrong way round: of the positions that hold padding it declares "
            f"{counted} valid and {left_out} padding; attention_mask has 1 = keep, a "
            "key_padding_mask has True = padding"
        )


def _run_from_the_end(marks: Tensor) -> Tensor:
    """The marks without a gap between them and the row's end: what is in the middle is input."""
    return marks.flip(1).long().cumprod(dim=1).flip(1).bool()


def _holds(tokens: object, token: int) -> bool:
    return token in tokens if isinstance(tokens, (list, tuple)) else tokens == token
