"""powernorm: normalization for Transformers beyond LayerNorm.

Layers (`PowerNorm`, `RegularizedBatchNorm`, `AdaNorm`, …), the scope of a padding mask
(`padding_mask`), functions of whole models (`penalty`, `set_loss_scale`), surgery on existing
models (`swap`, `insert`, `calibrate`, `freeze_statistics`, `fold`, `save`, `load`) and
diagnosis (`diagnose`). The names below are loaded when they are first used, so that `import
powernorm` costs nothing.
"""

from typing import TYPE_CHECKING

from powernorm.version import __version__ as __version__

__all__ = [
    "NORMS",
    "AdaNorm",
    "BatchNorm",
    "BatchRenorm",
    "BiasNorm",
    "Derf",
    "DetachNorm",
    "DyISRU",
    "DynamicTanh",
    "GatedRMSNorm",
    "GroupNorm",
    "GroupScaling",
    "Identity",
    "InputError",
    "LayerNorm",
    "MaskWarning",
    "Moments",
    "MovingAverageBatchNorm",
    "Norm",
    "PowerNorm",
    "PowerNormV",
    "ProgressiveRepBatchNorm",
    "RMSNorm",
    "RegularizedBatchNorm",
    "RepBatchNorm",
    "ScaleNorm",
    "SeeDNorm",
    "SimpleLayerNorm",
    "StatisticsFreezing",
    "TaperNorm",
    "UnifiedNorm",
    "Where",
    "build_norm",
    "calibrate",
    "declare_mask",
    "declare_norm",
    "diagnose",
    "fold",
    "freeze_statistics",
    "insert",
    "load",
    "mask_batch_norms",
    "match_teacher",
    "modularize",
    "ops",
    "padding_check",
    "padding_mask",
    "penalty",
    "plan_fold",
    "plan_insert",
    "plan_swap",
    "register_norm",
    "save",
    "set_loss_scale",
    "swap",
    "training_inference_discrepancy",
    "training_step",
    "unfreeze_statistics",
]

if TYPE_CHECKING:
    from powernorm import ops
    from powernorm.diagnosis import (
        diagnose,
        padding_check,
        training_inference_discrepancy,
    )
    from powernorm.errors import InputError
    from powernorm.inspection import Where, declare_mask, declare_norm
    from powernorm.integrations.saved_models import load, save
    from powernorm.norms import (
        NORMS,
        AdaNorm,
        BatchNorm,
        BatchRenorm,
        BiasNorm,
        Derf,
        DetachNorm,
        DyISRU,
        DynamicTanh,
        GatedRMSNorm,
        GroupNorm,
        GroupScaling,
        Identity,
        LayerNorm,
        MovingAverageBatchNorm,
        Norm,
        PowerNorm,
        PowerNormV,
        ProgressiveRepBatchNorm,
        RegularizedBatchNorm,
        RepBatchNorm,
        RMSNorm,
        ScaleNorm,
        SeeDNorm,
        SimpleLayerNorm,
        TaperNorm,
        UnifiedNorm,
        build_norm,
        padding_mask,
        penalty,
        register_norm,
        set_loss_scale,
        training_step,
    )
    from powernorm.ops import Moments
    from powernorm.surgery import (
        MaskWarning,
        StatisticsFreezing,
        calibrate,
        fold,
        freeze_statistics,
        insert,
        mask_batch_norms,
        match_teacher,
        modularize,
        plan_fold,
        plan_insert,
        plan_swap,
        swap,
        unfreeze_statistics,
    )
else:
    _SURGERY = (
        "MaskWarning",
        "StatisticsFreezing",
        "calibrate",
        "fold",
        "freeze_statistics",
        "insert",
        "mask_batch_norms",
        "match_teacher",
        "modularize",
        "plan_fold",
        "plan_insert",
        "plan_swap",
        "swap",
        "unfreeze_statistics",
    )

    def __getattr__(name):
        """Load a public name from its package on first use."""
        if name not in __all__:
            raise AttributeError(f"module 'powernorm' has no attribute {name!r}")
        from importlib import import_module

        if name == "ops":
            return import_module("powernorm.ops")
        packages = {
            **dict.fromkeys(_SURGERY, "surgery"),
            "InputError": "errors",
            "Where": "inspection",
            "declare_mask": "inspection",
            "declare_norm": "inspection",
            "Moments": "ops",
            "load": "integrations.saved_models",
            "save": "integrations.saved_models",
            "diagnose": "diagnosis",
            "padding_check": "diagnosis",
            "training_inference_discrepancy": "diagnosis",
        }
        from powernorm.integrations.extras import needed_for

        with needed_for(f"powernorm.{name}"):
            module = import_module(f"powernorm.{packages.get(name, 'norms')}")
        value = getattr(module, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
