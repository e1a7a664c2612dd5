"""What the early checkpoints of a setting show, measured once for each checkpoint."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from powernorm.data.batch import Batch
from powernorm.diagnosis import (
    Diagnosis,
    diagnose,
    evaluation_gap,
    training_inference_discrepancy,
)
from powernorm.lab.engine.folders import read_json, write_json
from powernorm.models.language_model import LanguageModel
from powernorm.runs import CHECKPOINTS_FOLDER, CONFIG_FILE, RunResult, VerdictRecord
from powernorm.training.batches import RunData
from powernorm.training.checkpoints import EARLY
from powernorm.training.evaluation import evaluate
from powernorm.training.losses import token_nll
from powernorm.training.trained_models import TrainedModel, load_trained, run_data

EARLY_FILE: Final = "early.json"
"""In a setting's folder: its early quantities, which take a while to measure."""
BASE: Final = "ln"

_FORMAT: Final = 2

Quantities = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class EarlyQuantities:
    """What the early checkpoints of one seed show."""

    tokens_per_batch: float
    quantities: Mapping[str, float | None]
    """By EARLY_QUANTITIES; of models that were lost by then there is none."""
    advice: str | None


@dataclass(frozen=True, slots=True)
class _Measured:
    """One norm's checkpoint, as `EARLY_FILE` keeps it."""

    digest: str | None
    """Of the checkpoint: another one, of the same seed too, is measured anew."""
    tokens_per_batch: float
    loss: float | None
    batch_loss: float | None
    """By the statistics of each batch; the same as `loss` for LayerNorm."""
    quantities: Quantities
    advice: str | None


def early_quantities(
    folder: Path, runs: Mapping[str, tuple[Path, RunResult]], num_batches: int
) -> EarlyQuantities:
    """Measure the early checkpoints of a setting where `EARLY_FILE` does not hold them.

    A run that was lost before its checkpoint, or whose checkpoint holds NaN, has no quantities.

    Args:
        folder: of the setting.
        runs: folders and results of one seed by norm, LayerNorm among them.
        num_batches: training batches in each pass of a diagnosis.

    Raises:
        InputError: a file is damaged, or a run that was not lost has no early checkpoint.
    """
    path = folder / EARLY_FILE
    kept = read_json(path) if path.exists() else {}
    if (kept.get("format"), kept.get("num_batches")) != (_FORMAT, num_batches):
        kept = {"norms": {}}
    data: RunData | None = None
    measured: dict[str, _Measured] = {}
    for norm, (run, result) in runs.items():
        digest = _digest(run / CHECKPOINTS_FOLDER / EARLY)
        old = kept["norms"].get(norm)
        if old is not None and digest is not None and old["digest"] == digest:
            measured[norm] = _Measured(**old)
            continue
        data = data or run_data(read_json(run / CONFIG_FILE))
        is_lost = digest is None and result["status"] != "finished"
        trained = None if is_lost else load_trained(run / CHECKPOINTS_FOLDER / EARLY)
        measured[norm] = _measure(norm, trained, data, digest, num_batches)
    norms = {norm: asdict(one) for norm, one in measured.items()}
    if norms != kept["norms"]:
        write_json(path, {"format": _FORMAT, "num_batches": num_batches, "norms": norms})
    return _together(measured)


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path.is_file() else None


def _together(measured: Mapping[str, _Measured]) -> EarlyQuantities:
    base = measured[BASE]
    quantities: Quantities = {}
    for norm, one in measured.items():
        quantities |= one.quantities
        if norm != BASE:
            quantities[f"{norm}_gap"] = _difference(one.loss, base.loss)
            quantities[f"{norm}_batch_gap"] = _difference(one.batch_loss, base.loss)
    return EarlyQuantities(base.tokens_per_batch, quantities, base.advice)


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def _measure(
    norm: str, trained: TrainedModel | None, data: RunData, digest: str | None, num_batches: int
) -> _Measured:
    tokens = data.segments.tokens_per_batch
    if trained is None or not _is_finite(trained.model):
        return _Measured(digest, tokens, None, None, {}, None)
    loss, batch_loss = _losses(trained.model, data)
    quantities: Quantities = {}
    advice = None
    # A loss that is not finite comes of activations that are not: there is nothing to diagnose.
    if math.isfinite(loss):
        batches = [data.segments.batch(index).inputs() for index in range(num_batches)]
        if norm == BASE:
            report = diagnose(trained.model, batches, _features, batch_sizes=())
            quantities, advice = _of_layer_norm(report), _advice(report.verdict)
        elif norm == "bn":
            quantities = _of_batch_norm(trained, batches)
    return _Measured(
        digest,
        tokens,
        _finite(loss),
        _finite(batch_loss),
        {name: _finite(value) for name, value in quantities.items()},
        advice,
    )


def _is_finite(model: nn.Module) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


def _finite(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None


def _losses(model: nn.Module, data: RunData) -> tuple[float, float]:
    """The loss on the valid split by running statistics and by those of each batch."""
    batches = list(data.evaluation("valid"))
    gap = evaluation_gap(model, batches, _mean_nll)
    if gap is not None:
        return gap.running_loss, gap.batch_loss
    loss = evaluate(model, batches, words_per_token=1.0, device=torch.device("cpu")).loss
    return loss, loss


def _mean_nll(model: nn.Module, batch: Batch) -> tuple[float, int]:
    nll = token_nll(model(**batch.inputs()), batch.targets)
    return float(nll) / max(batch.num_targets, 1), batch.num_targets


def _of_layer_norm(report: Diagnosis) -> Quantities:
    mean = [layer.mean_tid for layer in report.rows]
    var = [layer.var_tid for layer in report.rows]
    pn = [layer.pn_tid for layer in report.rows]
    total = [None if m is None or v is None else m + v for m, v in zip(mean, var, strict=True)]
    quantities: Quantities = {}
    for name, values in (("mean", mean), ("var", var), ("total", total), ("pn", pn)):
        known = [value for value in values if value is not None]
        quantities[f"ln_{name}_tid_last"] = values[-1]
        quantities[f"ln_{name}_tid_avg"] = sum(known) / len(known) if known else None
    return quantities


def _of_batch_norm(trained: TrainedModel, batches: Sequence[Any]) -> Quantities:
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


def _features(model: nn.Module, inputs: Mapping[str, Any]) -> object:
    """Run the layers only: the logits are no part of any norm."""
    assert isinstance(model, LanguageModel)
    return model.features(**inputs)
