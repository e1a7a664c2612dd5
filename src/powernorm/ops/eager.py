"""The backend that serves everything: the reference functions in eager torch."""

from powernorm.ops.reference.batch import batch_norm, batch_norm_backward
from powernorm.ops.reference.power import power_norm, power_norm_backward
from powernorm.ops.reference.state import absorb_centered, absorb_power, absorb_uncentered
from powernorm.ops.reference.static import static_norm, static_norm_backward
from powernorm.ops.reference.token import token_norm, token_norm_backward

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
