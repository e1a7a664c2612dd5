"""Batches: inputs, targets and padding masks."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm_lab.data.orders import Order

IGNORED: Final = -100
"""Target of positions without a loss, as in torch's cross entropy."""
MASK: Final = "padding_mask"
"""Input name of the mask of `tokens`, bool, (rows, length), True = padding."""
_MAIN: Final = ("tokens", "series")
"""Inputs whose mask is `MASK`."""
STARTS: Final = "starts"
"""Input name of the position in the text at which each row starts, int64, (rows,): a model with a
memory continues rows of an earlier batch. It stays on the CPU, because its values are compared."""
NOWHERE: Final = -1
"""Start of a row that is all padding."""


class Batch(NamedTuple):
    """Rows of inputs, with targets for each row or each position."""

    named: Mapping[str, Tensor]
    """Keyword arguments of the model's forward; their first dimension is that of the rows."""
    targets: Tensor
    """int64, (rows,) or (rows, length); `IGNORED` at positions without a target."""
    num_tokens: int
    """Number of positions without padding, or of rows, over which norms take statistics."""
    num_targets: int
    """Number of rows or positions with a target."""
    loss_targets: float | None = None
    """Divisor of the summed loss; None is `num_targets`. A process with a part of a batch divides
    by its share of the whole batch's targets, so that the mean over processes is that over the
    batch; a micro-batch divides by the mean over its update."""
    logged_targets: float | None = None
    """Divisor of the logged loss; None is that of the loss."""
    positional: tuple[str, ...] = ("tokens",)
    """Names of inputs with positions, (rows, length) or (rows, length, features). The mask of
    `tokens` and of `series` is `padding_mask`, that of another input is its name with
    `_padding_mask`; a mask without padding may be missing."""
    is_cut: bool = False
    """Whether a process cuts these inputs and the targets to the longest of its rows: if batches
    are measured in tokens, the rows of one process may be much shorter than the longest one."""

    @property
    def _masks(self) -> dict[str, str]:
        """Return the names of the batch's inputs with positions, by the names of their masks."""
        return {
            MASK if name in _MAIN else f"{name}_{MASK}": name
            for name in self.positional
            if name in self.named
        }

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward."""
        return dict(self.named)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; copies from pinned memory are asynchronous."""
        ahead = device.type == "cuda"
        moved = {
            name: value if name == STARTS else value.to(device, non_blocking=ahead)
            for name, value in self.named.items()
        }
        return self._replace(named=moved, targets=self.targets.to(device, non_blocking=ahead))

    def shard(self, rank: int, size: int) -> "Batch":
        """Return the rows of one of `size` processes: every `size`-th row from `rank`.

        A process without rows gets a row of padding, or the first row without targets if rows have
        no positions, so that it calls every layer, and every exchange of statistics, as often as
        the other processes.
        """
        is_empty = len(self.targets) <= rank
        rows = slice(0, 1) if is_empty else slice(rank, None, size)
        named = {name: value[rows] for name, value in self.named.items()}
        targets = self.targets[rows]
        if is_empty:
            named, targets = self._all_padding(named), torch.full_like(targets, IGNORED)
        if self.is_cut:
            named, targets = self._cut(named), _trimmed(targets, targets == IGNORED)
        num_targets = int((targets != IGNORED).sum())
        return self._replace(
            named=named,
            targets=targets,
            num_tokens=self._num_tokens(named, num_targets),
            num_targets=num_targets,
            loss_targets=(self.loss_targets or self.num_targets) / size,
            logged_targets=None if self.logged_targets is None else self.logged_targets / size,
        )

    def masked(self, names: Collection[str]) -> "Batch":
        """Return the batch with masks of these names; missing ones are without padding."""
        masks = {
            mask: _no_mask(self.named[name])
            for mask, name in self._masks.items()
            if mask in names and mask not in self.named
        }
        return self._replace(named={**self.named, **masks}) if masks else self

    def joined_with(self, others: Sequence["Batch"]) -> "Batch":
        """Return one batch of all rows, padded to the longest, without `starts`.

        Consecutive batches become rows of one batch, so that a memory cannot connect them.
        """
        parts = [self, *others]
        named = {
            name: _stacked([part.named[name] for part in parts], 0)
            for name in self.named
            if name not in {*self._masks, STARTS}
        }
        for mask, name in self._masks.items():
            is_padded = any(
                mask in part.named or part.named[name].shape[1] < named[name].shape[1]
                for part in parts
            )
            if is_padded:
                named[mask] = _stacked([_mask(part.named, mask, name) for part in parts], True)
        return self._replace(
            named=named,
            targets=_stacked([part.targets for part in parts], IGNORED),
            num_tokens=sum(part.num_tokens for part in parts),
            num_targets=sum(part.num_targets for part in parts),
            loss_targets=_sum([part.loss_targets for part in parts]),
            logged_targets=_sum([part.logged_targets for part in parts]),
        )

    def _all_padding(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows of padding of the same sizes; inputs without masks are returned unchanged."""
        masks = {mask: ~_no_mask(named[name]) for mask, name in self._masks.items()}
        if not masks:
            return dict(named)
        starts = {name: torch.full_like(named[name], NOWHERE) for name in named.keys() & {STARTS}}
        return {name: torch.zeros_like(value) for name, value in named.items()} | masks | starts

    def _cut(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs cut to their longest rows, without masks that have no padding."""
        cut = dict(named)
        for mask, name in self._masks.items():
            if mask in named:
                cut[name], cut[mask] = (_trimmed(named[part], named[mask]) for part in (name, mask))
                if not cut[mask].any():
                    del cut[mask]
        return cut

    def _num_tokens(self, named: Mapping[str, Tensor], num_rows: int) -> int:
        """Count the positions without padding, or the rows if no input has positions."""
        counts = [int((~_mask(named, *names)).sum()) for names in self._masks.items()]
        return sum(counts) if counts else num_rows


def _trimmed(values: Tensor, padding: Tensor) -> Tensor:
    """Return rows without trailing columns of padding; at least one column stays."""
    return values[:, : max(1, int((~padding).sum(1).max()))]


def _mask(named: Mapping[str, Tensor], mask: str, name: str) -> Tensor:
    return named[mask] if mask in named else _no_mask(named[name])


def _no_mask(values: Tensor) -> Tensor:
    """Return the mask of values without padding, (rows, length)."""
    return torch.zeros(values.shape[:2], dtype=torch.bool, device=values.device)


def _stacked(parts: Sequence[Tensor], filling: int) -> Tensor:
    """Concatenate rows, with the other dimensions padded to the largest size."""
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    return torch.cat([_widened(part, shape, filling) for part in parts])


def _widened(part: Tensor, shape: Sequence[int], filling: int) -> Tensor:
    missing = [size - own for size, own in zip(shape[1:], part.shape[1:], strict=True)]
    # `pad` counts the dimensions from the last one on.
    widths = [width for number in reversed(missing) for width in (0, number)]
    return F.pad(part, widths, value=filling)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


class TrainingBatches:
    """The batches of a training run, in an order that depends only on seed and position.

    Args:
        order: assigns rows to batches.
        batch_of: returns the batch for the numbers of its rows and its position.
        tokens_per_batch: mean number of positions without padding in a batch.
        num_targets: returns the number of targets of rows; needed if it differs between batches.
        batches_per_update: micro-batches over which the gradient is summed. Several ones divide
            their losses by the mean number of their targets, so that all targets of an update have
            equal weight.
    """

    def __init__(
        self,
        order: Order,
        batch_of: Callable[[Tensor, int], Batch],
        *,
        tokens_per_batch: float,
        num_targets: Callable[[Tensor], int] | None = None,
        batches_per_update: int = 1,
    ) -> None:
        self._order = order
        self._batch_of = batch_of
        self.batches_per_epoch = order.batches_per_epoch
        """Number of batches in a pass over the rows."""
        self.tokens_per_batch = tokens_per_batch
        self._num_targets = num_targets
        self._batches_per_update = batches_per_update

    def batch(self, position: int) -> Batch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        batch = self._batch_of(self._order.at(position), position)
        size = self._batches_per_update
        if self._num_targets is None or size == 1:
            return batch
        first = position - position % size
        total = sum(self._num_targets(self._order.at(first + part)) for part in range(size))
        return batch._replace(loss_targets=total / size)


class EvaluationBatches:
    """The batches of an evaluation, always the same.

    Args:
        parts: source of each batch, such as the numbers of its rows.
        batch_of: returns the batch for its part and its number.
    """

    def __init__(
        self, parts: "Sequence[Any] | EvaluationBatches", batch_of: Callable[[Any, int], Batch]
    ) -> None:
        self._parts = parts
        self._batch_of = batch_of

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""
        for number, part in enumerate(self._parts):
            yield self._batch_of(part, number)
