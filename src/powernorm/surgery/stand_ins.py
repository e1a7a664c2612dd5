"""Layers of this library that replace torch's BatchNorms while a model is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.mask_owners import attach_mask_owners
from powernorm.inspection.modules import name_without_compile
from powernorm.inspection.selection import stacks
from powernorm.norms import BatchStatisticsNorm
from powernorm.surgery.successors import a_tensor, successor


@contextmanager
def torch_batch_norms_replaced(
    model: nn.Module, norms: Sequence[FoundNorm] | None = None
) -> Iterator[dict[str, nn.Module]]:
    """Replace torch's BatchNorms by those of this library in the block.

    They have the same parameters, statistics and modes, and get the model's padding mask if it
    fits their input. They are removed afterwards, also after an exception.

    Args:
        model: a model with BatchNorms of torch.
        norms: norms of the model, if they are known.

    Yields:
        The BatchNorms of torch, by the names of the layers that replace them.
    """
    norms = find_norms(model) if norms is None else norms
    chosen = [norm for norm in norms if _is_torchs(norm)]
    fallback = a_tensor(model)
    replaced: dict[str, nn.Module] = {}
    with ExitStack() as undo:
        for norm in chosen:
            new = cast(BatchStatisticsNorm, successor(norm, "bn", {}, fallback))
            new.strict_masks = False
            replaced[name_without_compile(norm.names[0])] = norm.inner[1]
            for slot in norm.slots:
                undo.callback(slot.parent._modules.__setitem__, slot.attribute, norm.module)
                slot.parent._modules[slot.attribute] = new
        names = [name for norm in chosen for name in norm.names]
        sides = stacks(model, [name for norm in norms for name in norm.names])
        for use in attach_mask_owners(model, names, sides):
            undo.callback(use.release)
        yield replaced


def _is_torchs(norm: FoundNorm) -> bool:
    """Return whether a norm keeps running statistics and is torch's, or a wrapper around it."""
    kept = norm.reading is not None and norm.reading.statistics
    return isinstance(kept, nn.modules.batchnorm._BatchNorm)


@torch.no_grad()
def give_back(layer: BatchStatisticsNorm, to: nn.Module) -> None:
    """Write the statistics of a layer into the BatchNorm of torch that it replaces."""
    norm: Any = to
    norm.running_mean.copy_(layer.running_mean)
    norm.running_var.copy_(layer.running_var)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.clamp_(min=1)
