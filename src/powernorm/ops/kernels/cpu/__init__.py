"""CPU kernels: a C++ library with a plain C interface, called with addresses and sizes.

Names, arguments and outputs are those of the reference ops.
"""

from powernorm.ops.kernels.cpu.calls import update_running_stats
from powernorm.ops.kernels.cpu.norms import (
    batch_norm,
    batch_norm_backward,
    power_norm,
    power_norm_backward,
    prepare_batch_norm,
    prepare_power_norm,
    prepare_token_norm,
    static_norm,
    static_norm_backward,
    token_norm,
    token_norm_backward,
)

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "power_norm",
    "power_norm_backward",
    "prepare_batch_norm",
    "prepare_power_norm",
    "prepare_token_norm",
    "static_norm",
    "static_norm_backward",
    "token_norm",
    "token_norm_backward",
    "update_running_stats",
]
