"""Diagnosis of a run of `compare`: its checkpoint on its batches."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.diagnosis import Diagnosis, diagnose
from powernorm.diagnosis.diagnosing import BATCH_SIZES
from powernorm.diagnosis.evaluation import evaluate_statistics
from powernorm.errors import InputError
from powernorm.inspection.batches import Progress
from powernorm.inspection.devices import Device, checked_device, moved, placed
from powernorm.inspection.modules import batch_layers
from powernorm.records import EvaluationRow
from powernorm_lab.data.batch import Batch
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.statistics_scores import score_by_statistics, split_scores
from powernorm_lab.tasks.trained_models import TrainedModel, load_trained, run_config, run_text
from powernorm_lab.training.losses import outputs_nll

EVALUATION_TOKENS: Final = 16384
"""Approximate number of tokens of the valid split evaluated with each kind of statistics."""


def diagnose_run(
    path: Path,
    *,
    data: str | None = None,
    num_batches: int = 50,
    device: Device = "cpu",
    scores: EvaluatedSplit | None = None,
    on_progress: Progress | None = None,
    on_scored: Progress | None = None,
) -> Diagnosis:
    """Diagnose the model of a run on its training batches.

    A model with batch statistics is also evaluated with running, re-estimated and batch statistics:
    the loss on a part of the valid split, or loss and the task's scores on a whole split.

    Args:
        path: a run's folder, for the weights that were scored, or one of its checkpoints.
        data: another text, as for `--data`; None is that of the run.
        num_batches: training batches in each pass, ≥ 2.
        device: device of the diagnosis; see `powernorm.diagnose`.
        scores: split to score; None scores none. It is evaluated, or translated, up to nine times.
        on_progress: see `powernorm.diagnose`.
        on_scored: progress over the kinds of statistics with which the split is scored.

    Raises:
        InputError: there is no such run or device, the run or its text cannot be read, there are
            fewer than 2 batches, or `scores` is given for a model without batch statistics.
    """
    place = checked_device(device)
    if num_batches < 2:
        raise InputError(f"num_batches is {num_batches}, expected at least 2: TID compares batches")
    trained = load_trained(path)
    if scores is not None and not batch_layers(trained.model):
        raise InputError(
            f"{path} has no norm with batch statistics, so its only score is that of its result: "
            "leave out --scores"
        )
    config = run_config(trained.settings)
    encoded = run_text(trained.settings, data=data)
    seed = int(trained.settings["seed"])
    data_of_run = task_of(config).data(encoded, config, seed)
    batches = _of_one_kind([data_of_run.batches.batch(at) for at in range(num_batches)])
    with placed(trained.model, place):
        report = diagnose(trained.model, batches, _features, on_progress=on_progress)
        if scores is None:
            evaluation = _evaluation(trained, config, encoded, batches)
        else:
            split = split_scores(trained.model, config, encoded, seed, scores)
            evaluation = score_by_statistics(split, batches, _features, on_scored)
    return replace(report, model=_name_of(path), step=trained.step, evaluation=evaluation)


def _evaluation(
    trained: TrainedModel,
    config: ComparisonSettings,
    encoded: Any,
    population: list[dict[str, Tensor]],
) -> tuple[EvaluationRow, ...]:
    if not batch_layers(trained.model):
        return ()
    task = task_of(config)
    # Batches of sentence pairs are measured in tokens, all others in rows.
    length = getattr(config.data, "sequence_length", 1)
    size: dict[str, Any] = (
        {"evaluation_batch_size": max(1, BATCH_SIZES[0] // length)}
        if getattr(config.data, "batch_tokens", None) is None
        else {"batch_tokens": max(BATCH_SIZES[0], length)}
    )
    chosen = replace(config, data=replace(config.data, **size))
    data = task.data(encoded, chosen, int(trained.settings["seed"]))
    smallest = list(data.evaluation("valid", EVALUATION_TOKENS))
    by_size = {}
    for tokens in BATCH_SIZES:
        # Joined batches of the same rows, so that every size has the same targets.
        batches = _joined(smallest, tokens // BATCH_SIZES[0])
        if len(batches) > 1:
            by_size[round(sum(batch.num_tokens for batch in batches) / len(batches))] = batches
    return evaluate_statistics(
        trained.model,
        _loss,
        population,
        smallest,
        forward=_features,
        by_batch=by_size or None,
    )


def _of_one_kind(batches: list[Batch]) -> list[dict[str, Tensor]]:
    """Return the inputs of the batches, all of them with the masks that any of them has."""
    names = {name for batch in batches for name in batch.named}
    return [batch.masked(names).inputs() for batch in batches]


def _joined(batches: list[Any], count: int) -> list[Batch]:
    return [
        batches[first].joined_with(batches[first + 1 : first + count])
        for first in range(0, len(batches), count)
    ]


def _features(model: Any, inputs: Mapping[str, Any]) -> object:
    """Run the layers without the output, which has no norms."""
    return model.features(**moved(inputs, _device_of(model)))


def _loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    batch = batch.to(_device_of(model))
    with torch.no_grad():
        total = outputs_nll(model, model(**batch.inputs()), batch.targets)
    return total / max(batch.num_targets, 1), batch.num_targets


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _name_of(path: Path) -> str:
    folder = path if path.is_dir() else path.parent.parent
    return folder.resolve().name
