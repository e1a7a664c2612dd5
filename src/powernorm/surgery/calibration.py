"""Calibration: population statistics, averaged exactly over data, replace running statistics."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from powernorm.inspection.batches import (
    Forward,
    Progress,
    call_model,
    check_batches,
    check_repeatable,
)
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.modules import (
    Names,
    batch_layers,
    choose_layers,
    name_without_compile,
)
from powernorm.inspection.observer import NormCall
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.arguments import check_choice, check_function, check_model
from powernorm.norms.preserved_state import preserved_state
from powernorm.norms.registry import short_name
from powernorm.ops.moments import Moments
from powernorm.surgery.populations import (
    Buffers,
    adopt_batch,
    adopt_statistics,
    check_not_empty,
    check_population,
    evaluated_statistics,
    evaluating,
    order_of_calls,
    write_statistics,
)
from powernorm.surgery.stand_ins import give_back, torch_batch_norms_replaced

Way = Literal["layer_by_layer", "one_pass"]
"""Statistics that the layers below use while a layer is measured, see `calibrate`."""


@dataclass(frozen=True, kw_only=True)
class CalibrationRow(NormRow):
    """Calibration of one layer.

    Attributes:
        tokens: number of valid tokens behind the statistics, over all processes.
        mean_shift: mean over features of |μ_new - μ_old|/σ_new; None for a layer without a mean.
        std_shift: mean over features of |σ_new - σ_old|/σ_new (ψ without centering); σ includes
            eps. None for a layer that was kept unchanged.
    """

    tokens: int = 0
    mean_shift: float | None = None
    std_shift: float | None = None


@dataclass(frozen=True)
class CalibrationReport(NormTable):
    """Shift of the statistics of each layer, in the order in which the model calls the layers."""

    rows: Sequence[CalibrationRow]


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None = None,
    *,
    names: Names | None = None,
    way: Way = "layer_by_layer",
    on_progress: Progress | None = None,
) -> CalibrationReport:
    """Replace running statistics by those of the whole data, averaged exactly.

    Running statistics are a moving average over the last batches, while the weights changed. This
    function measures them again over all valid tokens of `batches` (re-estimation; Wang et al.
    2022, Table 7), in units of each layer's evaluation: the variance divides by M - 1, by M in a
    `released` variant; norms that do not center get ψ². Everything else in the model runs as in
    evaluation (dropout off); padding does not count.

    - `way="layer_by_layer"`: the statistics of each layer are measured while all layers called
      before it already evaluate by their new ones. They are those of the network as it is
      evaluated: each layer's input has exactly these statistics on these data. Neither the earlier
      statistics nor the batching of the tokens matters. It takes one pass over the data for each
      layer. This is the default, because it is right for every norm and for a LayerNorm model
      that was swapped to a static norm, and a few dozen batches suffice.
    - `way="one_pass"`: all layers are measured in one pass in which every layer normalizes by the
      statistics of the batch, as the papers do. It is cheap, and works with data that can be
      iterated over only once. But a layer sees inputs that the evaluated network never produces,
      increasingly so for smaller batches and deeper layers.

    PowerNorm and MABN past their warm-up, and BatchRenorm past its plain BatchNorm, normalize by
    their running statistics in training too. The weights are adapted to these, and measuring them
    again changes the function: such layers are kept, in a row with the reason, unless
    `names` names them. Layers in evaluation mode and frozen ones are calibrated too.

    Args:
        model: a model with norms with running statistics, of this library or torch's.
        batches: batches on the model's device; for more than one layer in `layer_by_layer` an
            iterable that can be iterated over several times (torch's random numbers are the same
            in each pass, so that a shuffling loader yields the same batches).
        forward: runs the model on a batch. None calls `model(batch)` for a tensor,
            `model(*batch)` for a tuple or list and `model(**batch)` for a mapping.
        names: globs over module names; other layers keep and evaluate by their statistics. None
            means all layers whose statistics are not part of the trained function, except torch's
            that no batch goes through.
        way: see above.
        on_progress: called after every batch with (batches done, batches in all); the second is
            0 if it is unknown.

    Returns:
        One row per norm: the number of tokens and the shift of its statistics, or why it was kept.

    Raises:
        InputError: no layer with batch statistics, a glob that matches none, a layer that no
            batch went through, no valid token, a moment that is not finite, batches that can be
            iterated over only once although several passes are needed. Nothing has changed then.

    State:
        Running statistics are written in place. A layer that has not seen a batch counts one
        (and MABN's window holds the new ψ²), so that it no longer counts as untrained; other
        counters stay. A warm-up is not shortened, because a forward cannot provide the gradient
        statistics that it collects. A new PowerNorm therefore continues to train by batch
        statistics, and its ψ² moves away from the calibrated value. Weights, modes,
        torch's random numbers, ν, `momentum` and pending penalties stay as before.

    Numerics:
        Sums in float64. A layer that is called several times in one forward pools its calls. The
        later calls see inputs that were normalized by an estimate of `one_pass`, so for such a
        layer `layer_by_layer` is exact up to that.

    Distributed:
        Moments are merged over each layer's process group (not for `sync=False`): once at the
        end of `one_pass`, at the end of each pass of `layer_by_layer`. Processes may have
        different numbers of batches, or none, but all have to call this function. While
        measuring, batch statistics are those of one process.

    >>> model = torch.nn.Sequential(powernorm.BatchNorm(4))
    >>> report = calibrate(model, [torch.randn(8, 4) for _ in range(3)])
    >>> report.rows[0].tokens
    24
    """
    check_choice("way", way, get_args(Way))
    check_model(model)
    norms = find_norms(model)
    with torch_batch_norms_replaced(model, norms) as torchs:
        # Without names, torch's that no batch goes through keep their trained statistics.
        optional = torchs if names is None else {}
        report = _calibrate(model, batches, forward, names, way, on_progress, optional)
        layers = batch_layers(model)
        for row in report.rows:
            if row.name in torchs and row.action == "calibrate":
                give_back(layers[row.name], torchs[row.name])
    rows = [replace(row, kind="batch") if row.name in torchs else row for row in report.rows]
    return CalibrationReport((*rows, *_others(norms, rows, optional)))


def check_calibratable(model: nn.Module) -> None:
    """Raise an InputError unless the model has a norm that `calibrate` takes."""
    with torch_batch_norms_replaced(model):
        choose_layers(model, None, "to calibrate")


def _calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None,
    names: Names | None,
    way: Way,
    on_progress: Progress | None,
    optional: Container[str],
) -> CalibrationReport:
    layers = choose_layers(model, names, "to calibrate")
    kept = {} if names is not None else _trained_with(layers)
    layers = {name: layer for name, layer in layers.items() if name not in kept}
    check_batches(batches)
    check_function("forward", forward)
    check_function("on_progress", on_progress)
    if way == "layer_by_layer" and len(layers) > 1:
        check_repeatable(batches, f"for way='layer_by_layer' {len(layers)}")
    num_passes = len(layers) if way == "layer_by_layer" else 1
    kept_rows = tuple(_kept_row(name, layer) for name, layer in kept.items())
    if not layers:
        return CalibrationReport(kept_rows)
    survey = _Survey(model, layers, batches, forward or call_model, num_passes, on_progress)
    with preserved_state(model, layers.values()):
        for layer in layers.values():
            # Keep the state that `adopt_statistics` leaves: PRepBN's mixture depends on it.
            layer.num_batches_tracked.clamp_(min=1)
        populations = survey.measure(way, optional)
        new = {
            name: evaluated_statistics(layers[name], moments)
            for name, moments in populations.items()
        }
    rows = [_row(name, layers[name], populations[name], new[name]) for name in new]
    for name, statistics in new.items():
        adopt_statistics(layers[name], statistics)
    return CalibrationReport((*rows, *kept_rows))


def _others(
    norms: Sequence[FoundNorm], rows: Sequence[CalibrationRow], unseen: Container[str]
) -> Iterator[CalibrationRow]:
    """Yield rows of the norms that are not calibrated."""
    for norm in norms:
        name = name_without_compile(norm.names[0])
        if any(row.name == name or row.name.startswith(f"{name}.") for row in rows):
            continue
        has_statistics = norm.reading is not None and norm.reading.statistics is not None
        batch = isinstance(norm.module, BatchStatisticsNorm) or norm.kind == "batch"
        reason = "not selected" if has_statistics and batch else "keeps no running statistics"
        if name in unseen:
            reason = "no batch went through it"
        yield CalibrationRow(name=name, kind=norm.kind, action="keep", reason=norm.reason or reason)


def _trained_with(layers: Mapping[str, BatchStatisticsNorm]) -> dict[str, BatchStatisticsNorm]:
    """Return the layers whose running statistics are part of the trained function."""
    return {name: layer for name, layer in layers.items() if layer.trains_by_running_stats}


def _kept_row(name: str, layer: BatchStatisticsNorm) -> CalibrationRow:
    return CalibrationRow(
        name=name,
        kind=short_name(layer),
        action="keep",
        reason="it trains by its running statistics, to which the weights are adapted: "
        f"measuring them again changes the model; names={name!r} does so",
    )


@dataclass
class _Survey:
    """Passes over the data that pool the moments of the layers' inputs."""

    model: nn.Module
    """In evaluation mode, except for the layers, which are also called in it."""
    layers: Mapping[str, BatchStatisticsNorm]
    """Layers to measure; their buffers are written, and the caller restores them."""
    batches: Iterable[Any]
    run: Forward
    num_passes: int
    on_progress: Progress | None
    num_done: int = 0
    pools: dict[str, Moments] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_batches = _length(self.batches) * self.num_passes

    def measure(self, way: Way, optional: Container[str]) -> dict[str, Moments]:
        """Return each layer's population moments over all processes, in the order of the calls.

        Layers in `optional` that were not called are left out.
        """
        self._go_through(self.layers, normalize_by_batch=True)
        order = order_of_calls(self.layers, self.pools, "no batch went", optional)
        if way == "layer_by_layer":
            self.num_batches -= self.num_done * (len(self.layers) - len(order))
        merged = {name: self._merged(name) for name in self.layers}
        if way == "one_pass":
            for name in order:
                check_population(name, self.layers[name], merged[name])
            return {name: merged[name] for name in order}
        for index, name in enumerate(order):
            if index:
                self._go_through([name], normalize_by_batch=False)
                merged[name] = self._merged(name)
            check_population(name, self.layers[name], merged[name])
            write_statistics(
                self.layers[name], evaluated_statistics(self.layers[name], merged[name])
            )
            if not index:
                # Drop the last batch's statistics; a layer that is called twice reads its own.
                for later in order[1:]:
                    write_statistics(
                        self.layers[later],
                        evaluated_statistics(self.layers[later], merged[later]),
                    )
        return {name: merged[name] for name in order}

    def _go_through(self, measured: Container[str], *, normalize_by_batch: bool) -> None:
        self.pools = {}

        def measure(call: NormCall) -> None:
            if call.name in measured:
                moments = call.moments()
                self._add(call.name, moments)
                if normalize_by_batch:
                    # All norms can evaluate by the batch's own statistics; in training mode some
                    # would normalize by running statistics.
                    adopt_batch(self.layers[call.name], moments)

        with evaluating(self.layers, measure):
            count = 0
            # Every pass draws the same numbers: a shuffling loader yields the same batches.
            with torch.random.fork_rng(devices=[]):
                for batch in self.batches:
                    self.run(self.model, batch)
                    count += 1
                    self._report()
        self.num_batches = self.num_batches or count * self.num_passes
        check_not_empty(count, self.layers)

    def _report(self) -> None:
        self.num_done += 1
        if self.on_progress is not None:
            self.on_progress(self.num_done, self.num_batches)

    def _add(self, name: str, batch: Moments) -> None:
        earlier = self.pools.get(name)
        self.pools[name] = batch if earlier is None else earlier.merge(batch)

    def _merged(self, name: str) -> Moments:
        layer = self.layers[name]
        own = self.pools.get(name)
        if own is None:  # no data in this process
            own = Moments.zero(layer.num_features, layer.num_batches_tracked.device)
        return own.all_reduce(layer.group_name)


def _length(batches: Iterable[Any]) -> int:
    """Return the number of batches, 0 if it is unknown."""
    try:
        return len(batches) if isinstance(batches, Sized) else 0
    except TypeError:  # a DataLoader over a stream
        return 0


def _row(
    name: str, layer: BatchStatisticsNorm, population: Moments, new: Buffers
) -> CalibrationRow:
    *mean, square = new  # names of the buffers; only centered layers have a mean
    deviation, before = (
        (values + layer.eps).sqrt() for values in (new[square], layer.get_buffer(square).double())
    )
    mean_shift = None
    if mean:
        difference = new[mean[0]] - layer.get_buffer(mean[0]).double()
        mean_shift = (difference.abs() / deviation).mean().item()
    std_shift = ((deviation - before).abs() / deviation).mean().item()
    return CalibrationRow(
        name=name,
        kind=short_name(layer),
        action="calibrate",
        tokens=int(population.count),
        mean_shift=mean_shift,
        std_shift=std_shift,
    )
