"""The ops as Triton programs, and each update of running statistics as one.

Names, arguments, outputs and meanings are those of the ops' references. Importing this needs
the package triton; what is exported takes tensors on the GPU (anywhere under Triton's interpreter).
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
