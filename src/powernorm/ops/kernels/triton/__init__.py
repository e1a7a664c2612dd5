"""The ops and the updates of running statistics as Triton programs.

Names, arguments and outputs are those of the reference ops. Importing this needs the package
triton; the functions take tensors on the GPU (on any device under Triton's interpreter).
"""

from powernorm.ops.kernels.triton.batch_norm import batch_norm, batch_norm_backward
from powernorm.ops.kernels.triton.power_norm import power_norm, power_norm_backward
from powernorm.ops.kernels.triton.running_stats import update_running_stats
from powernorm.ops.kernels.triton.static_norm import static_norm, static_norm_backward
from powernorm.ops.kernels.triton.token_norm import token_norm, token_norm_backward

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "power_norm",
    "power_norm_backward",
    "static_norm",
    "static_norm_backward",
    "token_norm",
    "token_norm_backward",
    "update_running_stats",
]
