"""Records of a norm's calls in a monitored step, and the metrics computed from them.

Observers reduce inputs and gradients to `CallRecord`s of float64 sums on the device, without
synchronizing with it. At the end of a step one transfer copies the records to the host, where they
become cells of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from powernorm.diagnosis.distances import Statistics, discrepancies, fluctuations
from powernorm.diagnosis.gradients import NUM_GRADIENT_SUMS, Calls, needs_products, part_norms
from powernorm.norms import BatchStatisticsNorm
from powernorm.ops.moments import Moments
from powernorm.ops.processes import all_reduce_sum
from powernorm.ops.running_stats import centered_moments

_FINGERPRINT_SIZE: Final = 16

Kind = Literal["input", "input gradient", "output gradient"]


@dataclass(frozen=True, eq=False)
class CallRecord:
    """Record of one call of a norm, forward or backward.

    Attributes:
        layer: index of the norm in the model.
        kind: which tensor was observed.
        sums: sums that add up over processes, float64.
        own: values that are the same on every process or that only this one needs, float64.
        is_finite: whether the whole tensor was finite; known on the host only.
    """

    layer: int
    kind: Kind
    sums: Tensor
    own: Tensor
    is_finite: bool = True


Cells = dict[str, float | None]

_STATISTICS: Final = ("mean_tid", "var_tid", "mean_distance", "var_distance")


def merge(records: Sequence[CallRecord], groups: Mapping[int, str]) -> list[CallRecord]:
    """Return the records summed over the processes of each group, with one collective per group.

    Args:
        records: records of this process; every process of a group has the same calls.
        groups: name of the process group of each layer, `""` for none.
    """
    merged = list(records)
    for group in sorted(set(groups.values()) - {""}):
        # Autograd's order may differ between processes; that of one layer's calls is fixed.
        members = [i for i, one in enumerate(records) if groups.get(one.layer) == group]
        members.sort(key=lambda i: (records[i].layer, records[i].kind, i))
        if not members:
            continue
        flat = torch.cat([records[i].sums.flatten() for i in members])
        parts = all_reduce_sum(flat, group).split([records[i].sums.numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            one = records[i]
            merged[i] = CallRecord(one.layer, one.kind, part.view_as(one.sums), one.own)
    return merged


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the host in float64, copied in one transfer."""
    device = tensors[0].device
    flat = torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def fetch_records(
    records: Sequence[CallRecord], more: Sequence[Tensor]
) -> tuple[list[CallRecord], list[Tensor]]:
    """Return records and other tensors on the host, copied in one transfer."""
    host = fetch([*(one.sums for one in records), *(one.own for one in records), *more])
    number = len(records)
    fetched = [
        # A float64 sum of such sums does not overflow, and NaN and infinity stay.
        CallRecord(one.layer, one.kind, sums, own, math.isfinite(float(sums.sum())))
        for one, sums, own in zip(records, host, host[number : 2 * number], strict=False)
    ]
    return fetched, host[2 * number :]


def gradient_cells(records: Iterable[CallRecord], num_tokens: float, scale: float) -> Cells:
    """Return the norm of the whole input gradient, and mean and variance of a token's.

    The latter are those of Xu et al. 2019, Theorem 1.

    Args:
        records: records of one layer.
        num_tokens: number of tokens that it was called with.
        scale: factor that the loss was multiplied by.
    """
    found = [one.sums for one in records if one.kind == "input gradient"]
    names = ("gradient_norm", "token_gradient_mean", "token_gradient_var")
    if not found:
        return dict.fromkeys(names)
    squares, mean, var = (torch.stack(found).sum(0) / _powers(scale)).tolist()
    size = max(num_tokens, 1.0)
    return dict(zip(names, (math.sqrt(squares), mean / size, var / size), strict=True))


def _powers(scale: float) -> Tensor:
    powers = torch.tensor([scale**2, scale, scale**2], dtype=torch.float64, device="cpu")
    assert powers.shape == (NUM_GRADIENT_SUMS,)
    return powers


@dataclass(frozen=True, eq=False)
class BatchStep:
    """Records of one step of a layer with batch statistics.

    Args:
        layer: a layer, of which only the settings are read.
        records: records of the step, on the host.
        running: the running statistics after the step, on the host.
        scale: factor that the loss was multiplied by.
    """

    layer: BatchStatisticsNorm
    records: Sequence[CallRecord]
    running: Statistics
    scale: float

    @property
    def inputs(self) -> list[CallRecord]:
        """Input records of the calls that had tokens."""
        return [one for one in self.records if one.kind == "input" and not _is_empty(one)]

    @property
    def num_tokens(self) -> float:
        """Number of valid tokens of all calls."""
        return sum(float(one.sums[0, 0]) for one in self.inputs)

    def cells(self) -> Cells:
        """Return TID, distances and parts of the gradient; None for values that do not exist."""
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

    def _parts(self, inputs: list[CallRecord]) -> Cells:
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

    def _state(self, record: CallRecord) -> Tensor:
        return record.own[_FINGERPRINT_SIZE:].view(-1, self.layer.num_features)


def _is_empty(record: CallRecord) -> bool:
    return not record.sums[0, 0] > 0


def _moments(inputs: Sequence[CallRecord]) -> Moments:
    count, mean, squares = centered_moments(torch.stack([one.sums for one in inputs]))
    return Moments(count[:, :1], mean, squares)


def _paired(records: Sequence[CallRecord]) -> list[tuple[CallRecord, CallRecord]]:
    """Return each forward with the output gradient of the same input, matched by fingerprint.

    The nearest fingerprint is used; if several are equal, that of the latest call, as backwards run
    in reverse.
    """
    left = [one for one in records if one.kind == "input"]
    pairs = []
    for gradient in records:
        if gradient.kind == "output gradient" and left:
            nearest = 0
            if len(left) > 1:
                distances = [_distance(one.own[:_FINGERPRINT_SIZE], gradient.own) for one in left]
                nearest = min(range(len(left)), key=lambda i: (distances[i], -i))
            pairs.append((left.pop(nearest), gradient))
    return pairs


def fingerprint(x: Tensor) -> Tensor:
    """Return a few values of x, (_FINGERPRINT_SIZE,) float64, to recognize it.

    A recomputed input may differ in its last bits: compare by `_distance`.
    """
    flat = x.detach().reshape(-1)
    # Odd steps, so that the values are of different features.
    steps = max(1, flat.shape[0] // _FINGERPRINT_SIZE) | 1
    samples = flat[::steps][:_FINGERPRINT_SIZE].to(torch.float64)
    return torch.nn.functional.pad(samples, (0, _FINGERPRINT_SIZE - samples.shape[0]))


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the distance of two fingerprints."""
    return float((a.nan_to_num() - b.nan_to_num()).abs().max())
