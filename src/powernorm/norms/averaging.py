"""Support for torch's `update_bn`, which re-estimates running statistics after weight averaging.

It looks for torch's own batch norms among a model's modules, resets them, sets their momentum to
None for the plain average, and runs the model over the data. If our layers derived from torch's
class, `SyncBatchNorm.convert_sync_batchnorm` and others would find and replace them too. So a layer
shows `update_bn`, and no other caller, a stand-in module beside itself.
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

if TYPE_CHECKING:
    from powernorm.norms.batch_statistics import BatchStatisticsNorm

_UPDATE_BN: Final[CodeType | None] = getattr(inspect.unwrap(update_bn), "__code__", None)
_ITERATORS: Final = ("modules", "named_modules")


class _UpdatedBatchNorm(nn.BatchNorm1d.__base__):  # type: ignore[misc,name-defined]
    """Stand-in module that `update_bn` sees; it has no parameters, buffers or children."""

    layer: BatchStatisticsNorm
    _is_running: bool = False

    def __init__(self, layer: BatchStatisticsNorm) -> None:
        nn.Module.__init__(self)
        self.__dict__["layer"] = layer  # not as a child

    def reset_running_stats(self) -> None:
        """Reset the layer's running statistics."""
        self.layer.reset_running_stats()

    @property
    def momentum(self) -> float | None:
        """The layer's momentum; `update_bn` sets it to None at the start, and back at the end."""
        return self.layer.momentum

    @momentum.setter
    def momentum(self, momentum: float | None) -> None:
        self._is_running = not self._is_running
        self.layer.is_reestimated = self._is_running
        self.layer.momentum = momentum


def stand_in_for(layer: BatchStatisticsNorm) -> nn.Module:
    """Return a stand-in that `update_bn` takes for torch's batch norm, to re-estimate the layer."""
    return _UpdatedBatchNorm(layer)


def is_update_bn_asking() -> bool:
    """Return whether `update_bn` itself iterates over the modules."""
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in _ITERATORS:
        frame = frame.f_back
    return frame is not None and frame.f_code is _UPDATE_BN
