"""Two-pass Training Inference Discrepancy (TID) of Wang et al. 2022."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import nn

from powernorm.diagnosis.distances import Statistics, discrepancies
from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, call_model, check_repeatable
from powernorm.inspection.modules import batch_layers
from powernorm.inspection.observer import NormCall, observe
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.arguments import check_model
from powernorm.norms.preserved_state import preserved_state
from powernorm.norms.registry import short_name
from powernorm.ops.moments import Moments
from powernorm.records import PERCENT, TID, LayerMeasures
from powernorm.surgery.stand_ins import torch_batch_norms_replaced


def tid_of(layers: Sequence[DiscrepancyRow] | Sequence[LayerMeasures]) -> TID:
    """Return the last layer's TID and the mean over layers (W22, Tables 1, 4, 6)."""
    means = [layer.mean_tid for layer in layers if layer.mean_tid is not None]
    return TID(
        mean_last=layers[-1].mean_tid,
        var_last=layers[-1].var_tid,
        mean_avg=fmean(means) if means else None,
        var_avg=fmean(layer.var_tid for layer in layers),
    )


@dataclass(frozen=True, kw_only=True)
class DiscrepancyRow(NormRow):
    """TID of one layer, as fractions; `mean_tid` is None for a layer that does not center."""

    mean_tid: float | None = field(metadata=PERCENT)
    var_tid: float = field(metadata=PERCENT)


@dataclass(frozen=True)
class DiscrepancyReport(NormTable):
    """TID of every layer that was called, in the order of the model.

    Attributes:
        rows: one per layer.
        unobserved: names of layers with batch statistics that were never called.
    """

    rows: Sequence[DiscrepancyRow]
    unobserved: Sequence[str] = ()

    def summary(self) -> TID | None:
        """Return the last layer's TID and the mean over layers (W22, Tables 1, 4, 6), if any."""
        return tid_of(self.rows) if self.rows else None


class _Expectation:
    """Second pass: the mean over batches of the distance to the population."""

    def __init__(self, layer: BatchStatisticsNorm, population: Moments) -> None:
        self.eps = layer.eps
        self.population = Statistics.of(population, centered=layer.centered)
        self.sums = population.mean.new_zeros(3)

    def add(self, batch: Moments) -> None:
        parts = torch.stack(discrepancies(batch, self.population, self.eps))
        present = batch.count > 0
        # A batch without valid tokens has no statistics, so the expectation leaves it out.
        self.sums[:2] += torch.where(present, parts, 0.0)
        self.sums[2] += present


def training_inference_discrepancy(
    model: nn.Module, batches: Iterable[Any], forward: Forward | None = None
) -> DiscrepancyReport:
    """Measure how far batch statistics are from the population's, layer by layer.

    Wang et al. 2022, Definition 1: `mean_tid = E_B mean_c |μ_B - μ|/σ_B` and `var_tid = E_B mean_c
    |σ_B - σ|/σ_B` with biased σ_B; layers that do not center have `E_B mean_c |ψ_B - ψ|/ψ_B`
    only. The first pass pools the population over all valid tokens, the second takes the
    expectation over batches. In both, the norm layers normalize as in training, and everything else
    runs as in evaluation (dropout off). Weights, buffers, modes and torch's random numbers are
    unchanged afterwards, also after an exception.

    Args:
        model: a model with batch statistics, of this library or torch's; without any the report
            is empty.
        batches: read twice, so not a generator; each batch on the model's device.
        forward: runs the model on a batch. None calls `model(batch)` for a tensor,
            `model(*batch)` for a tuple or list and `model(**batch)` for a mapping.

    Raises:
        InputError: batches that can be read only once, no batch, no valid token, or a forward that
            calls none of the layers.

    Distributed:
        Only the batches of this process are measured. Layers that share statistics still exchange
        them, so every process must call this with the same number of batches.
    """
    check_model(model)
    with torch_batch_norms_replaced(model):
        return _discrepancy(model, batches, forward or call_model)


def _discrepancy(model: nn.Module, batches: Iterable[Any], run: Forward) -> DiscrepancyReport:
    layers = batch_layers(model)
    if not layers:
        return DiscrepancyReport(())
    check_repeatable(batches, "two")
    with preserved_state(model, layers.values()):
        populations: dict[str, Moments] = {}

        def pool(name: str, batch: Moments) -> None:
            known = populations.get(name)
            populations[name] = batch if known is None else known.merge(batch)

        _go_through(model, batches, run, layers, pool)
        if not populations:
            raise InputError(
                f"none of the {len(layers)} layers with batch statistics was called "
                f"(the first is {next(iter(layers))!r}); give a `forward` that runs the model"
            )
        expectations = {
            name: _Expectation(layers[name], populations[name])
            for name in layers
            if name in populations
        }

        def compare(name: str, batch: Moments) -> None:
            if name in expectations:
                expectations[name].add(batch)

        _go_through(model, batches, run, layers, compare)
    return DiscrepancyReport(
        tuple(_result(name, layers[name], item) for name, item in expectations.items()),
        tuple(name for name in layers if name not in populations),
    )


def _go_through(
    model: nn.Module,
    batches: Iterable[Any],
    run: Forward,
    layers: Mapping[str, BatchStatisticsNorm],
    receive: Callable[[str, Moments], None],
) -> None:
    def measure(call: NormCall) -> None:
        if call.module.training:
            receive(call.name, call.moments())

    empty = True
    with observe(layers, on_input=measure):
        for batch in batches:
            empty = False
            run(model, batch)
    if empty:
        raise InputError("batches is empty; TID needs at least one batch, better dozens")


def _result(name: str, layer: BatchStatisticsNorm, item: _Expectation) -> DiscrepancyRow:
    mean_sum, var_sum, count = item.sums.tolist()
    if not count:
        raise InputError(
            f"the batches hold no valid token for layer {name!r}: every position is padding; check "
            "that padding_mask is True at padding, not at tokens"
        )
    mean = mean_sum / count if layer.centered else None
    return DiscrepancyRow(
        name=name, kind=short_name(layer), action="keep", mean_tid=mean, var_tid=var_sum / count
    )
