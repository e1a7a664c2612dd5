"""Removal of LayerNorm and RMSNorm from an existing model: methods, losses, schedules.

The training around it, with data, checkpoints and a report, is the command `powernorm remove`.
"""

from powernorm.surgery.removal.layers import CenteredBatchNorm, FrozenDeviationNorm
from powernorm.surgery.removal.losses import (
    deviation_anchor,
    hidden_state_error,
    logit_divergence,
)
from powernorm.surgery.removal.methods import (
    MethodName,
    Removal,
    RemovalRow,
    build_removal,
    call_order,
    removable_norms,
)
from powernorm.surgery.removal.schedules import removal_steps

__all__ = [
    "CenteredBatchNorm",
    "FrozenDeviationNorm",
    "MethodName",
    "Removal",
    "RemovalRow",
    "build_removal",
    "call_order",
    "deviation_anchor",
    "hidden_state_error",
    "logit_divergence",
    "removable_norms",
    "removal_steps",
]
