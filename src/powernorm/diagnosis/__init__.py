"""Will batch statistics work here? Measuring, apart from drawing."""

from powernorm.diagnosis.discrepancy import (
    DiscrepancyReport,
    LayerDiscrepancy,
    training_inference_discrepancy,
)
from powernorm.diagnosis.monitor import NormMonitor, NormRow

__all__ = [
    "DiscrepancyReport",
    "LayerDiscrepancy",
    "NormMonitor",
    "NormRow",
    "training_inference_discrepancy",
]
