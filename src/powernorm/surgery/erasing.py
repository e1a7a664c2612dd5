"""Zeros at padding in front of convolutions, which else see what a sequence is padded with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.inspection.masking import attach_mask_owners
from powernorm.inspection.selection import stacks
from powernorm.norms.checkpointing import CallRecords, Seen
from powernorm.norms.feature_dims import features_last
from powernorm.norms.masks import check_padding_mask, current_padding_mask
from powernorm.ops.torch_private import may_be_repeated

_CHANNELS: Final = 1


def erase_padding(model: nn.Module, names: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Put hooks on convolutions; yield what takes them down.

    Args:
        model: whose masks say where padding is, in evaluation too.
        names: dotted names of the convolutions.
    """
    sides = stacks(model, list(names))
    for use in attach_mask_owners(model, list(names), sides, evaluated=True):
        yield use.release
    for name in names:
        yield PaddingEraser(model.get_submodule(name)).handle.remove


def erasing_convolutions(model: nn.Module) -> tuple[str, ...]:
    """Return the dotted names of the convolutions that have such a hook."""
    return tuple(
        name
        for name, module in model.named_modules()
        if any(
            isinstance(getattr(hook, "__self__", None), PaddingEraser)
            for hook in module._forward_pre_hooks.values()
        )
    )


class PaddingEraser:
    """Hook that sets a convolution's input to zero at padding.

    Args:
        convolution: gets the hook.
    """

    def __init__(self, convolution: nn.Module) -> None:
        self._records = CallRecords()
        self.handle: RemovableHandle = convolution.register_forward_pre_hook(self.erase)

    def erase(self, convolution: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Return the arguments of a call with zeros at padding; None without a mask."""
        if not args or args[0].ndim != 3:
            return None
        x = args[0]
        mask = current_padding_mask(features_last(x, _CHANNELS), convolution)
        if convolution.training and not torch.compiler.is_compiling() and may_be_repeated():
            # Autograd repeats a checkpointed part without the scopes around it.
            seen = self._records.replay(type(convolution).__name__, x, Seen(mask, 0, ()))
            mask = seen.padding_mask
        if mask is None:
            return None
        check_padding_mask(mask, x, _CHANNELS)
        return (x.masked_fill(mask.unsqueeze(_CHANNELS), 0.0), *args[1:])
