"""Diagnosis of the norms of a model: measures, verdict and monitor; plots are made elsewhere."""

from powernorm.diagnosis.diagnosing import diagnose
from powernorm.diagnosis.discrepancy import (
    DiscrepancyReport,
    DiscrepancyRow,
    training_inference_discrepancy,
)
from powernorm.diagnosis.evaluation import (
    EvaluationGap,
    closed_share,
    evaluate_statistics,
    evaluation_gap,
)
from powernorm.diagnosis.monitor import NormMonitor, NormRow
from powernorm.diagnosis.nonfinite import first_nonfinite
from powernorm.diagnosis.padding import PaddingLeak, PaddingReport, padding_check
from powernorm.diagnosis.reports import Diagnosis, DiagnosisRow
from powernorm.diagnosis.schedules import Schedule
from powernorm.diagnosis.verdicts import Limits

__all__ = [
    "Diagnosis",
    "DiagnosisRow",
    "DiscrepancyReport",
    "DiscrepancyRow",
    "EvaluationGap",
    "Limits",
    "NormMonitor",
    "NormRow",
    "PaddingLeak",
    "PaddingReport",
    "Schedule",
    "closed_share",
    "diagnose",
    "evaluate_statistics",
    "evaluation_gap",
    "first_nonfinite",
    "padding_check",
    "training_inference_discrepancy",
]
