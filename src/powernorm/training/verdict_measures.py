"""What was seen early in every setting, and what came of it, out of the run folders."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from powernorm.diagnosis import Limits
from powernorm.lab.engine.folders import read_result, write_json
from powernorm.runs import RunResult, run_name
from powernorm.training.comparison import OVER
from powernorm.training.config import early_step
from powernorm.training.verdict_early import BASE, early_quantities
from powernorm.training.verdict_scores import SIGNED, Case, advice_scores, half_split, scores_of
from powernorm.training.verdict_settings import Setting, VerdictStudy
from powernorm.verdict_runs import (
    EARLY_QUANTITIES,
    VERDICT_FILE,
    AdviceScore,
    GapRecord,
    VerdictResults,
    VerdictSetting,
)

CLEAR_GAP: Final = 0.01
"""Nats per token."""
COMPARED: Final = ("bn", "rbn", "pn")
_SPLIT_SEED: Final = 0
_PREDICTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "bn": (
        "ln_total_tid_last",
        "ln_total_tid_avg",
        "ln_mean_tid_last",
        "ln_mean_tid_avg",
        "ln_var_tid_last",
        "ln_var_tid_avg",
        "bn_mean_tid_last",
        "bn_var_tid_last",
        "bn_mean_tid_avg",
        "bn_var_tid_avg",
    ),
    "rbn": ("ln_total_tid_last", "ln_total_tid_avg"),
    "pn": ("ln_pn_tid_last", "ln_pn_tid_avg"),
}
_RIVALS: Final = (*SIGNED, "tokens_per_batch")


def measure_study(study: VerdictStudy, out: Path) -> VerdictResults:
    """Diagnose the early checkpoints, gather the final gaps, score, and write `verdict.json`.

    Settings in which LayerNorm or BatchNorm is not trained yet are left out, so that a part of the
    study can be looked at. Early quantities that were measured before are read.

    Args:
        study: that was trained.
        out: its folder.

    Raises:
        InputError: a file of a run is damaged.
    """
    settings = []
    measured = []
    for setting in study.settings:
        results = _results(setting, study, out / setting.name)
        if results.get(BASE, {}).keys() & results.get("bn", {}).keys():
            settings.append(_setting(setting, study, out / setting.name, results))
            measured.append(setting)
    # One division for all norms, those that are not trained everywhere yet too.
    choosing = [setting.name for setting in half_split(measured, _SPLIT_SEED)[0]]
    results_of_study = VerdictResults(
        format=1,
        preset=study.preset,
        num_batches=study.num_batches,
        clear_gap=CLEAR_GAP,
        choosing=choosing,
        settings=settings,
        scores=[
            score
            for norm in COMPARED
            for score in scores_of(
                norm, _cases(norm, settings), (*_PREDICTORS[norm], *_RIVALS), choosing
            )
        ],
        advice=_advice_scores(settings),
    )
    write_json(out / VERDICT_FILE, results_of_study)
    return results_of_study


def _results(
    setting: Setting, study: VerdictStudy, folder: Path
) -> dict[str, dict[int, RunResult]]:
    """Results by norm and seed, of runs that have ended."""
    found: dict[str, dict[int, RunResult]] = {}
    for phase in study.phases:
        for norm in phase.norms:
            for seed in phase.seeds:
                run = folder / run_name(norm, setting.config.model.placement, seed)
                result = read_result(run)
                if result is not None and result["status"] in OVER:
                    found.setdefault(norm, {})[seed] = result
    return found


def _setting(
    setting: Setting,
    study: VerdictStudy,
    folder: Path,
    results: Mapping[str, Mapping[int, RunResult]],
) -> VerdictSetting:
    config = setting.config
    step = early_step(config)
    assert step is not None
    seed = min(results[BASE].keys() & results["bn"].keys())
    runs = {
        norm: (folder / run_name(norm, config.model.placement, seed), results[norm][seed])
        for norm in (BASE, *COMPARED)
        if seed in results.get(norm, {})
    }
    early = early_quantities(folder, runs, study.num_batches)
    gaps = {norm: _gap(results[BASE], results[norm]) for norm in COMPARED if norm in results}
    return VerdictSetting(
        name=setting.name,
        group=setting.group,
        task=config.task,
        placement=config.model.placement,
        tokens_per_batch=early.tokens_per_batch,
        num_layers=config.model.num_layers,
        num_features=config.model.num_features,
        learning_rate=config.optimizer.learning_rate,
        max_steps=config.training.max_steps,
        early_step=step,
        early={name: early.quantities.get(name) for name in EARLY_QUANTITIES},
        advice=early.advice,
        gaps=gaps,
    )


def _gap(base: Mapping[int, RunResult], runs: Mapping[int, RunResult]) -> GapRecord:
    record = GapRecord(valid=[], test=[], seeds=[], num_lost=0, num_base_lost=0)
    for seed in sorted(base.keys() & runs.keys()):
        ours, theirs = _losses(runs[seed]), _losses(base[seed])
        if ours is not None and theirs is not None:
            record["valid"].append(ours[0] - theirs[0])
            record["test"].append(ours[1] - theirs[1])
            record["seeds"].append(seed)
        elif theirs is not None:
            record["num_lost"] += 1
        elif ours is not None:
            record["num_base_lost"] += 1
    return record


def _losses(result: RunResult) -> tuple[float, float] | None:
    """The losses on valid and test; None where the run was lost."""
    valid, test = result["metrics"]["valid_loss"], result["metrics"]["test_loss"]
    return None if valid is None or test is None else (valid, test)


def _cases(norm: str, settings: Sequence[VerdictSetting]) -> list[Case]:
    cases = []
    for setting in settings:
        gap = _mean_gap(setting, norm)
        if gap is None:
            continue
        gaps = setting["gaps"][norm]["test"]
        values = {name: value for name, value in setting["early"].items() if value is not None}
        values["tokens_per_batch"] = setting["tokens_per_batch"]
        for name, quantity in zip(SIGNED, (f"{norm}_gap", f"{norm}_batch_gap"), strict=True):
            if quantity in values:
                values[name] = values[quantity]
        cases.append(
            Case(
                name=setting["name"],
                group=setting["group"],
                gap=gap,
                is_clear=math.isinf(gap) or (abs(gap) >= CLEAR_GAP and _one_sign(gaps)),
                values=values,
                verdict=_verdict(norm, values),
            )
        )
    return cases


def _mean_gap(setting: VerdictSetting, norm: str) -> float | None:
    """The mean over seeds; infinite where one side was lost in more seeds than the other."""
    record = setting["gaps"].get(norm)
    if record is None:
        return None
    lead = record["num_lost"] - record["num_base_lost"]
    if lead:
        return math.copysign(math.inf, lead)
    return fmean(record["test"]) if record["test"] else None


def _advice_scores(settings: Sequence[VerdictSetting]) -> list[AdviceScore]:
    gaps: list[dict[str, float]] = []
    advice: list[str] = []
    for setting in settings:
        found = {norm: _mean_gap(setting, norm) for norm in COMPARED}
        known = {norm: gap for norm, gap in found.items() if gap is not None}
        if setting["advice"] is not None and len(known) == len(COMPARED):
            gaps.append(known)
            # Swapping the lowest layers only is none of what was trained; the last norm is kept.
            advice.append(setting["advice"] if setting["advice"] in known else BASE)
    return advice_scores(gaps, advice, CLEAR_GAP)


def _verdict(norm: str, values: Mapping[str, float]) -> bool | None:
    """Whether the default limits of `powernorm.diagnose` say that the norm would do worse.

    Its limit alone, though `diagnose` names but the first norm whose limit is kept.
    """
    limits = Limits()
    quantity, limit = {
        "bn": ("ln_total_tid_last", limits.bn),
        "rbn": ("ln_total_tid_last", limits.rbn),
        "pn": ("ln_pn_tid_last", limits.pn),
    }[norm]
    return values[quantity] > limit if quantity in values else None


def _one_sign(gaps: Sequence[float]) -> bool:
    return all(gap > 0 for gap in gaps) or all(gap < 0 for gap in gaps)
