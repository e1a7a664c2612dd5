"""`powernorm.diagnose`: measure batch statistics at the norms of a model, and judge them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, cast

from torch import nn

from powernorm.diagnosis.measures import embedding_spectra
from powernorm.diagnosis.regrouping import check_sizes
from powernorm.diagnosis.reports import Diagnosis, DiagnosisRow
from powernorm.diagnosis.survey import Observed, Survey
from powernorm.diagnosis.targets import Target, find_targets, left_out
from powernorm.diagnosis.verdicts import Limits, judge_layer, judge_model
from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, Progress, call_model, check_repeatable
from powernorm.inspection.devices import Device, MovedBatches, checked_device, placed
from powernorm.inspection.selection import Selection
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.arguments import check_flag, check_function
from powernorm.norms.feature_dims import LAST
from powernorm.norms.preserved_state import preserved_state
from powernorm.records import DIAGNOSED, BatchSizeRow, ScaleRecord

BATCH_SIZES: Final = (512, 1024, 2048, 4096, 8192, 16384)
"""Batch sizes, in tokens, into which the same tokens are regrouped."""

_BATCH_NORMS: Final = (BatchStatisticsNorm, nn.modules.batchnorm._BatchNorm)


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None = None,
    *,
    where: Selection = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    limits: Limits | None = None,
    spectra: bool = True,
    device: Device | None = None,
    on_progress: Progress | None = None,
) -> Diagnosis:
    """Measure batch statistics at every norm of a model, and judge whether they would work.

    The statistics are those of the inputs of the norms: LayerNorm, RMSNorm and BatchNorm of any
    library, and norms of this one. They are read by hooks: weights, buffers, modes, torch's random
    numbers and the model's outputs are unchanged afterwards, also after an exception. Everything
    runs as in evaluation (dropout off), except norms with batch statistics, which normalize by the
    batch as in training.

    The first pass over `batches` pools the population of each norm's valid tokens. The second takes
    the mean over batches of their distance from it: two-pass TID (Wang et al. 2022, Definition 1),
    for BatchNorm, PowerNormV and PowerNorm. Batches with less than a quarter of the average tokens,
    such as a loader's last, are left out of the mean, with a note. The second pass also splits the
    same tokens into batches of other sizes. If earlier norms already use batch statistics, other
    sizes are an approximation: the earlier norms still normalize by the batches as given.

    The verdict compares the last norm's mean and var TID with limits (see `Limits`); the page
    "Diagnosis" of the documentation reports how often it was right in an experiment.

    Args:
        model: any module; compiled parts run uncompiled.
        batches: read twice, so not a generator; tensors, tuples or keyword mappings that the model
            takes, on its device unless `device` is given, made as in training: TID depends on the
            batch size.
        forward: runs the model on a batch. None calls `model(batch)` for a tensor,
            `model(*batch)` for a tuple or list and `model(**batch)` for a mapping.
        where: which norms, as in `powernorm.swap`; None means all. The verdict for the model covers
            those that `powernorm.swap` would change: the encoder's in an encoder-decoder.
        batch_sizes: numbers of tokens, multiples of the smallest; sizes for which the data give
            fewer than two batches are left out. Empty for none.
        limits: limits of the verdict.
        spectra: also compute the spectra of covariances and embeddings, which takes time and memory
            that grow with C² for each norm (134 MB at 4,096 features; none is computed above).
        device: device to run on: `cuda`, `cuda:1`, `auto` for a GPU if there is one. The model is
            moved there and back again, and each batch when it is used. None moves nothing.
        on_progress: called after every batch with (batches done, batches in all); the second is
            0 in the first pass.

    Returns:
        A report; `to_rows()`, `write_csv`, `write_json`, `print`.

    Raises:
        InputError: a model without such norms; batches that can be read only once, that are empty,
            of one token, all the same or different in structure; a norm's input that is not finite
            (the message names layer and batch); no valid token; impossible batch sizes; a missing
            device.

    Numerics:
        Statistics are sums in float64 on the model's device; if that has no float64 (MPS), each
        input is moved to the CPU.

    Distributed:
        Only the batches of this process are measured. Norms that share statistics still exchange
        them, so every process must call this with the same number of batches.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> report = diagnose(layer, [torch.randn(4, 8, 16) for _ in range(3)])
    >>> [row.name for row in report.rows]
    ['norm1', 'norm2']
    """
    targets = find_targets(model, where)
    check_repeatable(batches, "two")
    check_function("forward", forward)
    check_function("on_progress", on_progress)
    # `()` and `[]` mean no other sizes.
    sizes = () if batch_sizes in ((), []) else check_sizes(batch_sizes)
    if limits is not None and not isinstance(limits, Limits):
        raise InputError(f"limits is a {type(limits).__name__}, expected a powernorm Limits")
    place = None if device is None else checked_device(device)
    survey = Survey(
        model, targets, batches if place is None else MovedBatches(batches, place),
        forward or call_model, sizes, check_flag("spectra", spectra), on_progress,
    )  # fmt: skip
    # All norms with batch statistics normalize by the batch, frozen and unselected ones too.
    training = [part for part in model.modules() if isinstance(part, _BATCH_NORMS)]
    with nullcontext() if place is None else placed(model, place):
        with preserved_state(model, training):
            survey.run()
        return _report(model, targets, survey, limits or Limits(), spectra=spectra)


def _report(
    model: nn.Module,
    targets: Sequence[Target],
    survey: Survey,
    limits: Limits,
    *,
    spectra: bool,
) -> Diagnosis:
    seen = survey.observed
    layers = {target: _layer(item, limits) for target, item in seen.items()}
    in_scope = [layer for target, layer in layers.items() if target.in_scope]
    unseen = [target.name for target in targets if target not in seen]
    notes = dict(survey.notes)
    if unseen:
        notes[f"no batch went through {', '.join(unseen)}"] = None
    embeddings = embedding_spectra(model, notes) if spectra else []
    tokens = [item for item in seen.values() if item.target.reading.feature_dim == LAST]
    most = max(tokens or seen.values(), key=lambda item: item.num_positions)
    return Diagnosis(
        model=type(model).__name__,
        rows=tuple(layers.values()),
        verdict=judge_model(in_scope or list(layers.values()), limits),
        batch_sizes=tuple(row for item in seen.values() for row in _size_rows(item)),
        spectra=tuple(embeddings),
        scales=tuple(_scales(seen)),
        evaluation=(),
        notes=tuple(notes),
        left_out=left_out(model, targets),
        num_batches=survey.num_batches,
        # A module that several layers share is called several times per batch.
        num_tokens=round(most.count * min(1.0, survey.num_batches / most.num_calls)),
        padding=1 - most.count / most.num_positions,
    )


def _layer(item: Observed, limits: Limits) -> DiagnosisRow:
    target = item.target
    layer = DiagnosisRow(
        name=target.name,
        kind=target.site.norm.kind,
        action="keep",
        norm=target.norm,
        index=target.site.layer,
        side=target.site.side,
        uses_batch_statistics=target.uses_batch_statistics,
        centered=target.centered,
        **dict.fromkeys(DIAGNOSED) | item.measures(),  # type: ignore[arg-type]
    )
    return layer.judged(*judge_layer(layer, limits))


def _size_rows(item: Observed) -> list[BatchSizeRow]:
    return [
        cast(
            BatchSizeRow,
            {"layer": item.target.name, "tokens": size, "num_batches": found.count} | found.cells(),
        )
        for size, found in item.sizes().items()
    ]


def _scales(seen: Mapping[Target, Observed]) -> list[ScaleRecord]:
    found = []
    for target, item in seen.items():
        scale = target.reading.scale()
        if scale is None or not target.uses_batch_statistics:
            continue
        square = item.moments()[0].cpu()
        scale = scale.detach().cpu()
        scale, square = scale[scale.isfinite()], square[scale.isfinite()]
        found.append(
            ScaleRecord(
                layer=target.name,
                weight=[float(f"{value:.5g}") for value in scale.double().tolist()],
                deviation=[float(f"{value:.5g}") for value in square.sqrt().tolist()],
            )
        )
    return found
