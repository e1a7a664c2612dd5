"""Records of checkpointed forwards, for the forward that autograd repeats in the backward.

Activation checkpointing runs a layer twice. The second run must see what the first one saw: the
padding mask (its scope is closed by then) and, for layers that normalize by running statistics,
those statistics (another backward may have updated them in between).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from powernorm.ops.graphs import in_backward

_MAX_RECORDS = 64
"""Maximum number of records; more forwards between a forward and its backward lose the oldest."""

FINGERPRINT_SIZE = 16


class Seen(NamedTuple):
    """What a call normalizes by, besides its input."""

    padding_mask: Tensor | None
    stage: int
    state: tuple[Tensor, ...]


@dataclass
class _Record:
    shape: torch.Size
    fingerprint: Tensor
    seen: Seen
    used: bool = field(default=False)


class CallRecords:
    """The last calls of one layer that activation checkpointing may repeat; eager mode only."""

    def __init__(self) -> None:
        self._records: deque[_Record] = deque(maxlen=_MAX_RECORDS)

    def replay(self, x: Tensor, seen: Seen) -> Seen:
        """Return what this call must normalize by: its own, or that of the call it repeats."""
        if in_backward():
            record = self._find(x)
            if record is None:
                return seen
            explicit = seen.padding_mask is not None
            return record.seen._replace(padding_mask=seen.padding_mask) if explicit else record.seen
        if _may_be_repeated():
            while self._records and self._records[0].used:
                self._records.popleft()
            state = tuple(tensor.clone() for tensor in seen.state)
            self._records.append(_Record(x.shape, _with_sum(x), seen._replace(state=state)))
        return seen

    def _find(self, x: Tensor) -> _Record | None:
        fitting = [record for record in reversed(self._records) if record.shape == x.shape]
        if len(fitting) > 1:
            # Recomputed values are equal to the last bit or nearly so, so the nearest record is
            # ours; among equals one that no backward has asked for, then the newest.
            own = _with_sum(x)
            fitting.sort(
                key=lambda record: (fingerprint_distance(record.fingerprint, own), record.used)
            )
        if not fitting:
            return None
        fitting[0].used = True
        return fitting[0]


def may_replay() -> bool:
    """Return whether this call is a repetition or may be repeated; else no record is needed."""
    return _may_be_repeated() or in_backward()


def _may_be_repeated() -> bool:
    # Reentrant checkpointing runs the first forward without gradients, the other kind under
    # hooks on saved tensors.
    if not torch.is_grad_enabled():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def fingerprint(x: Tensor) -> Tensor:
    """Return a few values of x, (FINGERPRINT_SIZE,) float64, to know it again by.

    A backward finds the record of its forward by it. Recomputed values may differ in their last
    bits: compare by `fingerprint_distance`.
    """
    flat = x.detach().reshape(-1)
    # Odd steps, so that not all are of one feature.
    steps = max(1, flat.shape[0] // FINGERPRINT_SIZE) | 1
    samples = flat[::steps][:FINGERPRINT_SIZE].to(torch.float64)
    return torch.nn.functional.pad(samples, (0, FINGERPRINT_SIZE - samples.shape[0]))


def _with_sum(x: Tensor) -> Tensor:
    """Return the fingerprint and the sum, for inputs that agree in a few values."""
    total = x.detach().sum(dtype=torch.float64)
    return torch.cat([fingerprint(x), total[None]])


def fingerprint_distance(a: Tensor, b: Tensor) -> float:
    """Return the distance of two fingerprints."""
    return float((a.nan_to_num() - b.nan_to_num()).abs().max())
