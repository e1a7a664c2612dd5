"""Surgery on models: swap and insert norms, calibrate and freeze statistics, fold static norms.

Each verb has a plan that can be inspected, `apply()` and `undo()`.
"""

from powernorm.inspection.mask_checks import MaskWarning
from powernorm.inspection.selection import Where
from powernorm.surgery.calibration import CalibrationReport, calibrate
from powernorm.surgery.folding.api import FoldPlan, FoldReport, fold, plan_fold
from powernorm.surgery.freezing import (
    StatisticsFreezing,
    freeze_statistics,
    unfreeze_statistics,
)
from powernorm.surgery.insertion import insert, plan_insert
from powernorm.surgery.matching import MatchReport, match_teacher
from powernorm.surgery.modularizing import Modularization, modularize
from powernorm.surgery.optimizers import decay_groups
from powernorm.surgery.plans import AppliedPlan, NormPlan, PlanRow
from powernorm.surgery.swapping import mask_batch_norms, plan_swap, swap

__all__ = [
    "AppliedPlan",
    "CalibrationReport",
    "FoldPlan",
    "FoldReport",
    "MaskWarning",
    "MatchReport",
    "Modularization",
    "NormPlan",
    "PlanRow",
    "StatisticsFreezing",
    "Where",
    "calibrate",
    "decay_groups",
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
]
