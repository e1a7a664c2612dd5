"""From the records of a step to its numbers: one transfer to the host, then float64 there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from powernorm.diagnosis.distances import Statistics, discrepancies, fluctuations
from powernorm.diagnosis.gradient_parts import Calls, needs_products, part_norms
from powernorm.diagnosis.token_gradients import NUM_GRADIENT_SUMS
from powernorm.diagnosis.watches import NUM_SAMPLES, Record
from powernorm.norms import BatchStatisticsNorm
from powernorm.ops.moments import Moments
from powernorm.ops.processes import all_reduce_sum

Cells = dict[str, float | None]

_STATISTICS: Final = ("mean_tid", "var_tid", "mean_distance", "var_distance")


def merge(records: Sequence[Record], groups: Mapping[int, str]) -> list[Record]:
    """The records with sums over the processes of each group; one collective a group.

    Args:
        records: of this process, the same calls on every process of a group.
        groups: name of the process group of each layer, `""` for none.
    """
    merged = list(records)
    for group in sorted(set(groups.values()) - {""}):
        # Autograd may serve devices in another order elsewhere; that of a layer's calls is fixed.
        members = [i for i, one in enumerate(records) if groups.get(one.layer) == group]
        members.sort(key=lambda i: (records[i].layer, records[i].kind, i))
        if not members:
            continue
        flat = torch.cat([records[i].sums.flatten() for i in members])
        parts = all_reduce_sum(flat, group).split([records[i].sums.numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            one = records[i]
            merged[i] = Record(one.layer, one.kind, part.view_as(one.sums), one.own)
    return merged


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host in float64, in one transfer."""
    device = tensors[0].device
    flat = torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def fetch_records(
    records: Sequence[Record], more: Sequence[Tensor]
) -> tuple[list[Record], list[Tensor]]:
    """Records and other tensors on the host."""
    host = fetch([*(one.sums for one in records), *(one.own for one in records), *more])
    number = len(records)
    fetched = [
        # A float64 sum of such sums does not overflow, and NaN and infinity stay.
        Record(one.layer, one.kind, sums, own, math.isfinite(float(sums.sum())))
        for one, sums, own in zip(records, host, host[number : 2 * number], strict=False)
    ]
    return fetched, host[2 * number :]


def gradient_cells(records: Iterable[Record], num_tokens: float, scale: float) -> Cells:
    """Norm of the whole input gradient, mean and variance of a token's (Xu et al., Theorem 1).

    Args:
        records: the input gradients of a layer.
        num_tokens: that went into it.
        scale: that the loss was multiplied by.
    """
    found = [one.sums for one in records if one.kind == "input gradient"]
    names = ("gradient_norm", "token_gradient_mean", "token_gradient_var")
    if not found:
        return dict.fromkeys(names)
    squares, mean, var = (torch.stack(found).sum(0) / _powers(scale)).tolist()
    size = max(num_tokens, 1.0)
    return dict(zip(names, (math.sqrt(squares), mean / size, var / size), strict=True))


def _powers(scale: float) -> Tensor:
    powers = torch.tensor([scale**2, scale, scale**2], dtype=torch.float64)
    assert powers.shape == (NUM_GRADIENT_SUMS,)
    return powers


@dataclass(frozen=True, eq=False)
class BatchReading:
    """What a step showed of a layer with batch statistics.

    Args:
        layer: only its settings are read.
        records: of the step, on the host.
        running: the running statistics after the step, on the host.
        scale: that the loss was multiplied by.
    """

    layer: BatchStatisticsNorm
    records: Sequence[Record]
    running: Statistics
    scale: float

    @property
    def inputs(self) -> list[Record]:
        """Of the calls that had tokens."""
        return [one for one in self.records if one.kind == "input" and not _is_empty(one)]

    @property
    def num_tokens(self) -> float:
        """Valid tokens of all calls."""
        return sum(float(one.sums[0, 0]) for one in self.inputs)

    def cells(self) -> Cells:
        """TID, distances and parts of the gradient; None for what does not exist."""
        cells: Cells = dict.fromkeys((*_STATISTICS, "mean_gradient_norm", "var_gradient_norm"))
        inputs = self.inputs
        if not inputs:
            return cells
        batch = _moments(inputs)
        measured = (
            *discrepancies(batch, self.running, self.layer.eps),
            *fluctuations(batch, self.running),
        )
        for name, values in zip(_STATISTICS, measured, strict=True):
            if self.layer.centered or not name.startswith("mean"):
                cells[name] = float(values.mean())
        return cells | self._parts(inputs)

    def _parts(self, inputs: list[Record]) -> Cells:
        if not any(one.kind == "input gradient" for one in self.records):
            return {}
        products = None
        if needs_products(self.layer):
            pairs = [pair for pair in _paired(self.records) if not _is_empty(pair[0])]
            if not pairs:
                return {}
            inputs = [forward for forward, _ in pairs]
            products = torch.stack([backward.sums for _, backward in pairs])
        states = torch.stack([self._state(one) for one in inputs])
        calls = Calls(_moments(inputs), states, products)
        mean, var = part_norms(self.layer, calls)
        cells: Cells = {"var_gradient_norm": math.sqrt(float(var.sum())) / self.scale}
        if mean is not None:
            cells["mean_gradient_norm"] = math.sqrt(float(mean.sum())) / self.scale
        return cells

    def _state(self, record: Record) -> Tensor:
        return record.own[NUM_SAMPLES:].view(-1, self.layer.num_features)


def _is_empty(record: Record) -> bool:
    return not record.sums[0, 0] > 0


def _moments(inputs: Sequence[Record]) -> Moments:
    count, total, squares = torch.stack([one.sums for one in inputs]).unbind(1)
    return Moments(count[:, :1], total, squares)


def _paired(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Each output gradient with the forward of the same input, by the samples of both.

    Recomputed values may differ in their last bits, so the nearest is taken; among equals the
    latest, for backwards come in the reverse order.
    """
    left = [one for one in records if one.kind == "input"]
    pairs = []
    for gradient in records:
        if gradient.kind == "output gradient" and left:
            nearest = 0
            if len(left) > 1:
                distances = [_distance(one, gradient) for one in left]
                nearest = min(range(len(left)), key=lambda i: (distances[i], -i))
            pairs.append((left.pop(nearest), gradient))
    return pairs


def _distance(one: Record, other: Record) -> float:
    gap = one.own[:NUM_SAMPLES].nan_to_num() - other.own.nan_to_num()
    return float(gap.abs().max())
