"""Batches of independent examples, each with one answer: texts with a class, images, states."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.lab.data.batch import IGNORED

MASK: Final = "padding_mask"
"""Name among the inputs of the mask, True = padding, (rows, length)."""


class Examples(NamedTuple):
    """Rows, and the class of each."""

    named: Mapping[str, Tensor]
    """Keyword arguments of the model's forward; the first dimension is that of the rows. Where one
    is called `padding_mask`, the others with its shape are padded as it says."""
    targets: Tensor
    """int64, (rows,); `IGNORED` where nothing is asked."""
    num_tokens: int
    """What the norms count: positions that are no padding, or rows."""
    num_targets: int
    """Rows that are asked for."""
    loss_targets: float | None = None
    """What the summed loss is divided by; None is `num_targets`."""

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward."""
        return dict(self.named)

    def to(self, device: torch.device) -> "Examples":
        """Return the batch on a device."""
        moved = {name: value.to(device) for name, value in self.named.items()}
        return self._replace(named=moved, targets=self.targets.to(device))

    def shard(self, rank: int, size: int) -> "Examples":
        """Return the rows of one of `size` processes: those from `rank` in steps of `size`.

        A process without rows gets the first one with nothing asked, all of it padding where there
        is a mask, so that it calls every layer as often as the others.
        """
        is_empty = len(self.targets) <= rank
        rows = slice(0, 1) if is_empty else slice(rank, None, size)
        named = {name: value[rows] for name, value in self.named.items()}
        targets = self.targets[rows]
        if is_empty:
            targets = torch.full_like(targets, IGNORED)
            if MASK in named:
                named[MASK] = torch.ones_like(named[MASK])
        return Examples(
            named=named,
            targets=targets,
            num_tokens=_num_tokens(named, targets),
            num_targets=int((targets != IGNORED).sum()),
            loss_targets=(self.loss_targets or self.num_targets) / size,
        )

    def joined_with(self, others: Sequence["Examples"]) -> "Examples":
        """Return one batch of all rows, padded to the longest where there is a mask."""
        parts = [self, *others]
        return Examples(
            named={name: _joined(parts, name) for name in self.named},
            targets=torch.cat([part.targets for part in parts]),
            num_tokens=sum(part.num_tokens for part in parts),
            num_targets=sum(part.num_targets for part in parts),
        )


def _num_tokens(named: Mapping[str, Tensor], targets: Tensor) -> int:
    if MASK in named:
        return int((~named[MASK]).sum())
    return int((targets != IGNORED).sum())


def _joined(parts: Sequence[Examples], name: str) -> Tensor:
    values = [part.named[name] for part in parts]
    mask = parts[0].named.get(MASK)
    if mask is None or parts[0].named[name].shape[:2] != mask.shape:
        return torch.cat(values)
    length = max(value.shape[1] for value in values)
    widths = (0, 0) * (values[0].ndim - 2)
    filling = name == MASK
    return torch.cat(
        [F.pad(value, (*widths, 0, length - value.shape[1]), value=filling) for value in values]
    )
