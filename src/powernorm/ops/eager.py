"""The backend that serves every input: the reference ops, in eager torch."""

from __future__ import annotations

from powernorm.ops import batch_norm as _batch
from powernorm.ops.moving_average_norm import reference as moving_average_norm
from powernorm.ops.moving_average_norm import reference_backward as moving_average_norm_backward
from powernorm.ops.power_norm import reference as power_norm
from powernorm.ops.power_norm import reference_backward as power_norm_backward
from powernorm.ops.running_stats import Update, update_running_stats
from powernorm.ops.static_norm import reference as static_norm
from powernorm.ops.static_norm import reference_backward as static_norm_backward
from powernorm.ops.token_norm import reference as token_norm
from powernorm.ops.token_norm import reference_backward as token_norm_backward
from powernorm.ops.unified_norm import reference as unified_norm
from powernorm.ops.unified_norm import reference_backward as unified_norm_backward

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "moving_average_norm",
    "moving_average_norm_backward",
    "power_norm",
    "power_norm_backward",
    "static_norm",
    "static_norm_backward",
    "token_norm",
    "token_norm_backward",
    "unified_norm",
    "unified_norm_backward",
    "update_running_stats",
]

batch_norm_backward = _batch.reference_backward


def batch_norm(args: _batch.BatchNormArgs, update: Update | None = None) -> _batch.BatchNormOutput:
    """Normalize, and update running statistics by the sums of this process."""
    output = _batch.reference(args)
    if update is not None:
        assert output.sums is not None
        update_running_stats(update, output.sums)
    return output
