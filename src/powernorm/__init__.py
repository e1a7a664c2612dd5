"""powernorm: normalization for Transformers beyond LayerNorm.

Layers (`PowerNorm`, `RegularizedBatchNorm`, `AdaNorm`, …), the padding mask's scope
(`padding_mask`) and what acts on a whole model (`penalty`, `rescale_backward_statistics`). The
names below are loaded when they are first used, so that `import powernorm` costs nothing.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "NORMS",
    "AdaNorm",
    "BatchNorm",
    "BatchRenorm",
    "DetachNorm",
    "DynamicTanh",
    "GroupNorm",
    "GroupScaling",
    "Identity",
    "InputError",
    "LayerNorm",
    "Moments",
    "MovingAverageBatchNorm",
    "Norm",
    "PowerNorm",
    "PowerNormV",
    "RMSNorm",
    "RegularizedBatchNorm",
    "SimpleLayerNorm",
    "accumulated_statistics",
    "build_norm",
    "ops",
    "padding_mask",
    "penalty",
    "rescale_backward_statistics",
    "training_inference_discrepancy",
]

if TYPE_CHECKING:
    from powernorm import ops
    from powernorm.diagnosis import training_inference_discrepancy
    from powernorm.errors import InputError
    from powernorm.norms import (
        NORMS,
        AdaNorm,
        BatchNorm,
        BatchRenorm,
        DetachNorm,
        DynamicTanh,
        GroupNorm,
        GroupScaling,
        Identity,
        LayerNorm,
        MovingAverageBatchNorm,
        Norm,
        PowerNorm,
        PowerNormV,
        RegularizedBatchNorm,
        RMSNorm,
        SimpleLayerNorm,
        accumulated_statistics,
        build_norm,
        padding_mask,
        penalty,
        rescale_backward_statistics,
    )
    from powernorm.ops import Moments
else:

    def __getattr__(name):
        """Load a public name from its room when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module 'powernorm' has no attribute {name!r}")
        from importlib import import_module

        if name == "ops":
            return import_module("powernorm.ops")
        rooms = {
            "InputError": "errors",
            "Moments": "ops",
            "training_inference_discrepancy": "diagnosis",
        }
        value = getattr(import_module(f"powernorm.{rooms.get(name, 'norms')}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
