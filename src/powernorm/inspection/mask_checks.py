"""Checks of a swapped model's first batches: whether padding has a mask."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from powernorm.inspection.selection import Side

LOOKS: Final = 20
"""Number of calls whose values are read, per module; reading them waits for the device."""

_DECLARE: Final = (
    "Declare the argument that marks padding (powernorm.declare_mask) before the swap, or "
    "pass the mask yourself: `with powernorm.padding_mask(mask):`"
)


class MaskWarning(UserWarning):
    """Warning that padding probably counts in a batch's statistics."""


class MaskChecks:
    """Checks of the masks of a model's first calls; each kind of warning is given once.

    Args:
        model: its `config` may name the padding token.
    """

    def __init__(self, model: nn.Module) -> None:
        self.starts_with_pad = False
        """Whether the decoder's input begins with the padding token."""
        self.only_pads = True
        """Whether that occurs only at padding, so that it reveals a missing mask."""
        self._looks: dict[str, int] = {}
        self._warned: set[str] = set()
        configs = (getattr(module, "config", None) for module in model.modules())
        config = next((config for config in configs if hasattr(config, "pad_token_id")), None)
        pad = getattr(config, "pad_token_id", None)
        self.pad_id = pad if isinstance(pad, int) else _padding_index(model)
        """The padding token, None if the model does not name it."""
        if isinstance(pad, int):
            self.starts_with_pad = getattr(config, "decoder_start_token_id", None) == pad
            # If one token both ends and pads, it also occurs where nothing is padded.
            found = [getattr(config, f"{kind}_token_id", None) for kind in ("eos", "bos", "sep")]
            lists = (one if isinstance(one, (list, tuple)) else [one] for one in found)
            self.only_pads = not any(pad in one for one in lists)

    def may_look(self, key: str) -> bool:
        """Count a read of values, which waits for the device; return if it is among the first."""
        self._looks[key] = self._looks.get(key, 0) + 1
        return self._looks[key] <= LOOKS

    def look_for_padding(
        self, what: str, data: Tensor, side: Side | None = None, advice: str = _DECLARE
    ) -> None:
        """Warn of a call without a mask whose data look padded.

        Args:
            what: why there is no mask.
            data: tokens (batch, length) or vectors (batch, length, features).
            side: side of the module in an encoder-decoder.
            advice: how to pass one.
        """
        if data.is_meta or not self.only_pads or not self.may_look(f"{side} {what}"):
            return
        pads = self.padding_in(data, side)
        if pads is not None and bool(pads.any()) and not bool(pads.all()):
            self.warn(
                "missing",
                f"{what}, but {int(pads.sum())} of {pads.numel()} positions look like padding: "
                f"they count in the statistics of the swapped norms. {advice}",
            )

    def look_at_rows(self, label: str, mask: Tensor, data: Tensor, side: Side | None) -> None:
        """Warn of a mask (batch, length) that marks whole rows with data as padding."""
        if data.is_meta or mask.is_meta or not self.may_look(f"{side} {label}"):
            return
        empty, pads = mask.all(dim=1), self.padding_in(data, side)
        if pads is not None and pads.shape == mask.shape:
            # Rows of padding only, which samplers add to fill a batch, are marked correctly.
            empty &= ~pads.all(dim=1)
        num_empty = int(empty.sum())
        if num_empty:
            what = "all" if num_empty == empty.numel() else f"{num_empty} of {empty.numel()}"
            self.warn(
                "rows",
                f"{label} marks {what} rows as nothing but padding: is it inverted?",
            )

    def padding_in(self, data: Tensor, side: Side | None) -> Tensor | None:
        """Return the positions that look like padding, (batch, length), or None if unknown."""
        if data.ndim == 3:
            return _run_from_the_end((data == 0).all(dim=-1))
        if data.is_floating_point() or self.pad_id is None:
            return None
        pads = data == self.pad_id
        if self.starts_with_pad and side == "decoder":
            pads[:, :1] = False
        return _run_from_the_end(pads) | _run_from_the_end(pads.flip(1)).flip(1)

    def warn(self, kind: str, message: str) -> None:
        """Give each kind of warning once."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, MaskWarning, stacklevel=2)


class OrderWatch(TorchFunctionMode):
    """Warns if a model sorts, reverses or flattens its vectors but not its mask.

    Args:
        mask: (batch, length).
        warn: function that gives the warning.
    """

    def __init__(self, mask: Tensor, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._sizes = tuple(mask.shape)
        self._warn = warn

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch and check its effect on vectors of this batch."""
        del types
        output = func(*args, **(kwargs or {}))
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.ndim < 2:
            return output
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] in ("torch", "powernorm"):
            return output  # inside attention or a norm, which preserve the order
        sizes = tuple(x.shape[:2])
        if sizes not in (self._sizes, self._sizes[::-1]) or x.dtype == torch.bool:
            return output
        if output.shape == x.shape:
            if func in _FLIPS or (func is Tensor.__getitem__ and _is_by_index(args[1])):
                self._warn("reorders its vectors")
        elif sizes != self._sizes and output.shape[:1] == (sizes[0] * sizes[1],):
            self._warn("flattens its vectors as (length, batch)")
        return output


_FLIPS: Final = (
    torch.flip, Tensor.flip, torch.roll, Tensor.roll, torch.index_select, Tensor.index_select,
)  # fmt: skip


def _is_by_index(index: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor | list) for part in parts[:2])


def _padding_index(model: nn.Module) -> int | None:
    """Return the padding token that a model's embeddings agree on, or None."""
    embeddings = (part for part in model.modules() if isinstance(part, nn.Embedding))
    tokens = {embedding.padding_idx for embedding in embeddings} - {None}
    return tokens.pop() if len(tokens) == 1 else None


def _run_from_the_end(marks: Tensor) -> Tensor:
    """Return the marks with no gap up to the end of their row; others in the row are input."""
    unmarked = (~marks).long()
    return unmarked.cumsum(1) - unmarked == unmarked.sum(1, keepdim=True)
