"""Will batch statistics work here? Measuring, apart from drawing."""

from powernorm.diagnosis.diagnosing import diagnose
from powernorm.diagnosis.discrepancy import (
    DiscrepancyReport,
    LayerDiscrepancy,
    training_inference_discrepancy,
)
from powernorm.diagnosis.layers import LayerDiagnosis
from powernorm.diagnosis.monitor import NormMonitor, NormRow
from powernorm.diagnosis.reports import Diagnosis
from powernorm.diagnosis.verdicts import Limits

__all__ = [
    "Diagnosis",
    "DiscrepancyReport",
    "LayerDiagnosis",
    "LayerDiscrepancy",
    "Limits",
    "NormMonitor",
    "NormRow",
    "diagnose",
    "training_inference_discrepancy",
]
