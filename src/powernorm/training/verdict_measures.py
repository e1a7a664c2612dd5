"""What was seen early in every setting, and what came of it, out of the run folders."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from powernorm.diagnosis import Diagnosis, Limits, diagnose, training_inference_discrepancy
from powernorm.models.language_model import LanguageModel
from powernorm.runs import (
    CHECKPOINTS_FOLDER,
    EARLY_QUANTITIES,
    VERDICT_FILE,
    GapRecord,
    RunResult,
    VerdictRecord,
    VerdictResults,
    VerdictSetting,
    run_name,
)
from powernorm.training.batches import RunData
from powernorm.training.checkpoints import EARLY
from powernorm.training.comparison import OVER
from powernorm.training.config import early_step
from powernorm.training.evaluation import evaluate
from powernorm.training.run_folders import read_json, read_result, write_json
from powernorm.training.trained_models import TrainedModel, load_trained, run_data
from powernorm.training.verdict_scores import Case, half_split, scores_of
from powernorm.training.verdict_settings import Setting, VerdictStudy

EARLY_FILE: Final = "early.json"
"""In a setting's folder: its early quantities, which take a while to measure."""
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
_RIVALS: Final = ("early_gap", "tokens_per_batch")


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
    for setting in study.settings:
        results = _results(setting, study, out / setting.name)
        if all(norm in results for norm in ("ln", "bn")):
            settings.append(_setting(setting, study, out / setting.name, results))
    scores = [
        score
        for norm in COMPARED
        for score in scores_of(norm, _cases(norm, settings), (*_PREDICTORS[norm], *_RIVALS))
    ]
    choosing, _ = half_split(_cases("bn", settings), _SPLIT_SEED)
    results_of_study = VerdictResults(
        format=1,
        preset=study.preset,
        num_batches=study.num_batches,
        clear_gap=CLEAR_GAP,
        choosing=[case.name for case in choosing],
        settings=settings,
        scores=scores,
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
    early = _early(setting, study, folder, results)
    gaps = {norm: _gap(results["ln"], results[norm]) for norm in COMPARED if norm in results}
    return VerdictSetting(
        name=setting.name,
        group=setting.group,
        task=config.task,
        placement=config.model.placement,
        tokens_per_batch=early["tokens_per_batch"],
        num_layers=config.model.num_layers,
        num_features=config.model.num_features,
        learning_rate=config.optimizer.learning_rate,
        max_steps=config.training.max_steps,
        early_step=step,
        early={name: early["quantities"].get(name) for name in EARLY_QUANTITIES},
        advice=early["advice"],
        gaps=gaps,
    )


def _gap(base: Mapping[int, RunResult], runs: Mapping[int, RunResult]) -> GapRecord:
    record = GapRecord(valid=[], test=[], seeds=[], num_lost=0)
    for seed in sorted(base.keys() & runs.keys()):
        ours, theirs = runs[seed]["metrics"], base[seed]["metrics"]
        valid, test = (
            _difference(ours, theirs, "valid_loss"),
            _difference(ours, theirs, "test_loss"),
        )
        if valid is not None and test is not None:
            record["valid"].append(valid)
            record["test"].append(test)
            record["seeds"].append(seed)
        elif theirs["test_loss"] is not None:
            record["num_lost"] += 1
    return record


def _difference(
    ours: Mapping[str, float | None], theirs: Mapping[str, float | None], key: str
) -> float | None:
    first, second = ours[key], theirs[key]
    return None if first is None or second is None else first - second


def _early(
    setting: Setting,
    study: VerdictStudy,
    folder: Path,
    results: Mapping[str, Mapping[int, RunResult]],
) -> dict[str, Any]:
    """The early quantities, measured where the file does not hold them yet."""
    seed = min(results["ln"].keys() & results["bn"].keys())
    path = folder / EARLY_FILE
    kept = read_json(path) if path.exists() else {}
    if (kept.get("seed"), kept.get("num_batches")) != (seed, study.num_batches):
        kept = {"seed": seed, "num_batches": study.num_batches, "quantities": {}, "losses": {}}
    norms = [norm for norm in ("ln", *COMPARED) if seed in results.get(norm, {})]
    if set(norms) <= set(kept["losses"]):
        return kept
    data: RunData | None = None
    for norm in norms:
        if norm in kept["losses"]:
            continue
        run = folder / run_name(norm, setting.config.model.placement, seed)
        trained = load_trained(run / CHECKPOINTS_FOLDER / EARLY)
        data = data or run_data(trained.settings)
        loss = evaluate(
            trained.model,
            data.evaluation("valid"),
            words_per_token=1.0,
            device=torch.device("cpu"),
        ).loss
        kept["losses"][norm] = loss if math.isfinite(loss) else None
        kept["tokens_per_batch"] = data.segments.tokens_per_batch
        batches = [data.segments.batch(index).inputs() for index in range(study.num_batches)]
        if norm == "ln":
            report = diagnose(trained.model, batches, _features, batch_sizes=())
            kept["quantities"] |= _of_layer_norm(report)
            kept["advice"] = _advice(report.verdict)
        if norm == "bn":
            kept["quantities"] |= _of_batch_norm(trained, batches)
    _add_gaps(kept)
    write_json(path, kept)
    return kept


def _add_gaps(kept: dict[str, Any]) -> None:
    base = kept["losses"].get("ln")
    for norm in COMPARED:
        loss = kept["losses"].get(norm)
        if loss is not None and base is not None:
            kept["quantities"][f"{norm}_gap"] = loss - base


def _of_layer_norm(report: Diagnosis) -> dict[str, float | None]:
    mean = [layer.mean_tid for layer in report.layers]
    var = [layer.var_tid for layer in report.layers]
    pn = [layer.pn_tid for layer in report.layers]
    total = [None if m is None or v is None else m + v for m, v in zip(mean, var, strict=True)]
    quantities: dict[str, float | None] = {}
    for name, values in (("mean", mean), ("var", var), ("total", total), ("pn", pn)):
        known = [value for value in values if value is not None]
        quantities[f"ln_{name}_tid_last"] = values[-1]
        quantities[f"ln_{name}_tid_avg"] = sum(known) / len(known) if known else None
    return quantities


def _of_batch_norm(trained: TrainedModel, batches: Sequence[Any]) -> dict[str, float | None]:
    tid = training_inference_discrepancy(trained.model, batches, _features).summary()
    assert tid is not None
    return {
        "bn_mean_tid_last": tid["mean_last"],
        "bn_var_tid_last": tid["var_last"],
        "bn_mean_tid_avg": tid["mean_avg"],
        "bn_var_tid_avg": tid["var_avg"],
    }


def _advice(verdict: VerdictRecord) -> str:
    if verdict["action"] == "keep" or verdict["norm"] is None:
        return "ln"
    if verdict["action"] == "swap lowest":
        return f"lowest {verdict['lowest']} to {verdict['norm']}"
    return verdict["norm"]


def _cases(norm: str, settings: Sequence[VerdictSetting]) -> list[Case]:
    cases = []
    for setting in settings:
        record = setting["gaps"].get(norm)
        if record is None or not (record["test"] or record["num_lost"]):
            continue
        lost = bool(record["num_lost"])
        gaps = record["test"]
        gap = math.inf if lost else sum(gaps) / len(gaps)
        values = {name: value for name, value in setting["early"].items() if value is not None}
        values["tokens_per_batch"] = setting["tokens_per_batch"]
        if f"{norm}_gap" in values:
            values["early_gap"] = values[f"{norm}_gap"]
        cases.append(
            Case(
                name=setting["name"],
                group=setting["group"],
                gap=gap,
                is_clear=lost or (abs(gap) >= CLEAR_GAP and _one_sign(gaps)),
                values=values,
                verdict=_verdict(norm, values),
            )
        )
    return cases


def _verdict(norm: str, values: Mapping[str, float]) -> bool | None:
    """Whether the default limits of `powernorm.diagnose` say that the norm would do worse."""
    limits = Limits()
    quantity, limit = {
        "bn": ("ln_total_tid_last", limits.bn),
        "rbn": ("ln_total_tid_last", limits.rbn),
        "pn": ("ln_pn_tid_last", limits.pn),
    }[norm]
    return values[quantity] > limit if quantity in values else None


def _one_sign(gaps: Sequence[float]) -> bool:
    return all(gap > 0 for gap in gaps) or all(gap < 0 for gap in gaps)


def _features(model: nn.Module, inputs: Mapping[str, Any]) -> object:
    """Run the layers only: the logits are no part of any norm."""
    assert isinstance(model, LanguageModel)
    return model.features(**inputs)
