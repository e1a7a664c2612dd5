"""The `verdict.json` of a study as the report reads it."""

from collections.abc import Mapping
from math import copysign, inf
from pathlib import Path
from statistics import fmean
from typing import Final, cast

from powernorm.report.json_files import JsonObject, read_object
from powernorm.verdict_runs import VERDICT_FILE, VerdictResults, VerdictSetting

_FORMAT: Final = 1
_MEND: Final = "write the file again with `powernorm compare verdict --resume`"

WORDS: Final[Mapping[str, str]] = {
    "ln_mean_tid_last": "LayerNorm model: mean TID, last norm",
    "ln_var_tid_last": "LayerNorm model: var TID, last norm",
    "ln_total_tid_last": "LayerNorm model: mean + var TID, last norm",
    "ln_mean_tid_avg": "LayerNorm model: mean TID, average",
    "ln_var_tid_avg": "LayerNorm model: var TID, average",
    "ln_total_tid_avg": "LayerNorm model: mean + var TID, average",
    "ln_pn_tid_last": "LayerNorm model: PowerNorm's TID, last norm",
    "ln_pn_tid_avg": "LayerNorm model: PowerNorm's TID, average",
    "bn_mean_tid_last": "BatchNorm model: mean TID, last norm",
    "bn_var_tid_last": "BatchNorm model: var TID, last norm",
    "bn_mean_tid_avg": "BatchNorm model: mean TID, average",
    "bn_var_tid_avg": "BatchNorm model: var TID, average",
    "early_gap": "early loss gap, threshold chosen",
    "early_gap > 0": "early loss gap, its sign",
    "early_gap_batch": "early loss gap by batch statistics, threshold chosen",
    "early_gap_batch > 0": "early loss gap by batch statistics, its sign",
    "tokens_per_batch": "tokens in a batch",
    "majority": "majority of the choosing half",
    "always worse": "a constant: always worse",
    "always better": "a constant: always better",
    "verdict": "its default limit of powernorm.diagnose alone",
}
"""Predictors in words."""


def read_verdict(folder: Path) -> VerdictResults:
    """Reads the `verdict.json` of a study.

    Raises:
        InputError: the file is missing, damaged or of another version.
    """
    found = read_object(folder / VERDICT_FILE, _MEND)
    found.check_format(_FORMAT, "`powernorm compare verdict --resume`")
    for setting in found.children("settings"):
        _check_setting(setting)
    for score in found.children("scores"):
        _check_score(score)
    for score in found.children("advice"):
        score.text("rule")
        for key in ("num_settings", "num_no_worse", "num_best"):
            score.whole(key)
    found.texts("choosing")
    found.sure_number("clear_gap")
    found.whole("num_batches")
    return cast(VerdictResults, dict(found.values))


def _check_setting(setting: JsonObject) -> None:
    for key in ("name", "group", "task", "placement"):
        setting.text(key)
    setting.sure_number("tokens_per_batch")
    early = setting.child("early")
    for key in early.values:
        early.number(key)
    if setting.values.get("advice") is not None:
        setting.text("advice")
    gaps = setting.child("gaps")
    for norm in gaps.values:
        gaps.child(norm).numbers("test")
        gaps.child(norm).whole("num_lost")
        gaps.child(norm).whole("num_base_lost")


def _check_score(score: JsonObject) -> None:
    for key in ("norm", "predictor"):
        score.text(key)
    for key in ("hits_choosing", "hits_scored", "splits_mean", "leave_one_out"):
        score.sure_number(key)
    for key in ("threshold", "auc", "auc_alike", "rank_correlation"):
        score.number(key)
    for key in ("leave_one_out_clear", "leave_one_group_out"):
        score.number(key)
    for key in ("interval", "splits_interval"):
        if len(score.numbers(key)) != 2:
            raise score.error(f"{key} does not have two numbers")
    for key in ("num_settings", "num_positive", "num_scored", "num_clear", "num_alike"):
        score.whole(key)


def mean_gap(setting: VerdictSetting, norm: str) -> float | None:
    """The mean over seeds; infinite where one side was lost in more seeds than the other.

    ∞ where that was the norm, −∞ where it was LayerNorm; None where nothing is known.
    """
    record = setting["gaps"].get(norm)
    if record is None:
        return None
    lead = record["num_lost"] - record["num_base_lost"]
    if lead:
        return copysign(inf, lead)
    return fmean(record["test"]) if record["test"] else None
