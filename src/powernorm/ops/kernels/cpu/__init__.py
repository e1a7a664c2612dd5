"""CPU kernels: a C++ library with a plain C interface, called with addresses and sizes.

Names, arguments and outputs are those of the reference ops.
"""

from powernorm.ops.kernels.cpu.batch_norm import batch_norm, batch_norm_backward
from powernorm.ops.kernels.cpu.batch_norm import prepare as prepare_batch_norm
from powernorm.ops.kernels.cpu.calls import update_running_stats
from powernorm.ops.kernels.cpu.power_norm import power_norm, power_norm_backward
from powernorm.ops.kernels.cpu.power_norm import prepare as prepare_power_norm
from powernorm.ops.kernels.cpu.static_norm import static_norm, static_norm_backward
from powernorm.ops.kernels.cpu.token_norm import prepare as prepare_token_norm
from powernorm.ops.kernels.cpu.token_norm import token_norm, token_norm_backward

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
