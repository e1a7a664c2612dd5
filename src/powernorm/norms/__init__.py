"""The layers: parameters, buffers, training and evaluation, masks; one family per file."""

from torch.serialization import add_safe_globals

from powernorm.norms.base import Norm
from powernorm.norms.batch import BatchNorm, PowerNormV
from powernorm.norms.batch_statistics import BatchStatisticsNorm
from powernorm.norms.checkpointing import CallRecords
from powernorm.norms.masks import current_padding_mask, padding_mask
from powernorm.norms.models import penalty, set_loss_scale, training_step
from powernorm.norms.moving_average import MovingAverageBatchNorm, center_weight
from powernorm.norms.penalties import Pending
from powernorm.norms.pointwise import Derf, DyISRU, DynamicTanh, Identity
from powernorm.norms.power import PowerNorm
from powernorm.norms.registry import (
    NORMS,
    NormInfo,
    build_norm,
    check_norm_options,
    norm_info,
    register_norm,
)
from powernorm.norms.regularized import RegularizedBatchNorm
from powernorm.norms.renorm import BatchRenorm
from powernorm.norms.reparametrized import ProgressiveRepBatchNorm, RepBatchNorm
from powernorm.norms.taper import TaperNorm
from powernorm.norms.token import (
    AdaNorm,
    DetachNorm,
    GroupNorm,
    GroupScaling,
    LayerNorm,
    RMSNorm,
    SimpleLayerNorm,
)
from powernorm.norms.token_scale import BiasNorm, GatedRMSNorm, ScaleNorm, SeeDNorm
from powernorm.norms.unified import UnifiedNorm

__all__ = [
    "NORMS",
    "AdaNorm",
    "BatchNorm",
    "BatchRenorm",
    "BatchStatisticsNorm",
    "BiasNorm",
    "Derf",
    "DetachNorm",
    "DyISRU",
    "DynamicTanh",
    "GatedRMSNorm",
    "GroupNorm",
    "GroupScaling",
    "Identity",
    "LayerNorm",
    "MovingAverageBatchNorm",
    "Norm",
    "NormInfo",
    "PowerNorm",
    "PowerNormV",
    "ProgressiveRepBatchNorm",
    "RMSNorm",
    "RegularizedBatchNorm",
    "RepBatchNorm",
    "ScaleNorm",
    "SeeDNorm",
    "SimpleLayerNorm",
    "TaperNorm",
    "UnifiedNorm",
    "build_norm",
    "center_weight",
    "check_norm_options",
    "current_padding_mask",
    "norm_info",
    "padding_mask",
    "penalty",
    "register_norm",
    "set_loss_scale",
    "training_step",
]

# `torch.load(file, weights_only=True)` may build these classes, which run no code from the file.
# The caller has to name the model's other classes.
_LAYERS = [one for one in globals().values() if isinstance(one, type) and issubclass(one, Norm)]
add_safe_globals([*_LAYERS, CallRecords, Pending])
