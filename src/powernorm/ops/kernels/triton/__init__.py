"""The reference functions as Triton programs, and the update of running statistics as one each.

Names, arguments, outputs and meanings are those of `powernorm.ops.reference`. Importing this needs
the package triton; what is exported takes tensors on the GPU (anywhere under Triton's interpreter).
"""

from powernorm.ops.kernels.triton.batch import batch_norm, batch_norm_backward
from powernorm.ops.kernels.triton.power import power_norm, power_norm_backward
from powernorm.ops.kernels.triton.running import absorb_centered, absorb_power, absorb_uncentered
from powernorm.ops.kernels.triton.static import static_norm, static_norm_backward
from powernorm.ops.kernels.triton.token import token_norm, token_norm_backward

__all__ = [
    "absorb_centered",
    "absorb_power",
    "absorb_uncentered",
    "batch_norm",
    "batch_norm_backward",
    "power_norm",
    "power_norm_backward",
    "static_norm",
    "static_norm_backward",
    "token_norm",
    "token_norm_backward",
]
