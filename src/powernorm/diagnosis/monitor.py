"""Monitor of the norms of a model in training, at a negligible cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.diagnosis.distances import Statistics
from powernorm.diagnosis.metrics import (
    BatchStep,
    CallRecord,
    Cells,
    fetch_records,
    gradient_cells,
    merge,
)
from powernorm.diagnosis.observers import BatchObserver, TokenObserver
from powernorm.diagnosis.schedules import Schedule
from powernorm.diagnosis.targets import name_of_norm
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.modules import check_not_compiled, modules_by_name
from powernorm.norms import BatchStatisticsNorm, Norm
from powernorm.norms.feature_dims import LAST
from powernorm.norms.pointwise import SaturatingNorm
from powernorm.norms.registry import short_name
from powernorm.records import NORMS_COLUMNS

NormRow = Mapping[str, str | int | float | None]
"""Values of one layer at one step, keyed by `powernorm.records.NORMS_COLUMNS`."""


@dataclass(frozen=True, eq=False)
class _Watched:
    """A norm under observation."""

    name: str
    norm: str
    """Short name."""
    observer: TokenObserver

    @property
    def batch_norm(self) -> BatchStatisticsNorm | None:
        """The norm, if it has batch statistics."""
        module = self.observer.module
        return module if isinstance(module, BatchStatisticsNorm) else None

    @property
    def group_name(self) -> str:
        """Name of the process group that it shares its statistics with, `""` for none."""
        return "" if self.batch_norm is None else self.batch_norm.group_name


class NormMonitor:
    """Monitor of the statistics, gradients and non-finite values of every norm in training.

    For norms with batch statistics it measures online TID (Wang et al. 2022, Fig. 4), fluctuations
    of the statistics (Shen et al. 2020, Fig. 2, 4 left) and norms of the parts of the input
    gradient that flow through them (Fig. 3, 4 right). For all norms, torch's and other libraries'
    LayerNorm and RMSNorm included, it measures the norm of the whole input gradient, its mean and
    variance per token (Xu et al. 2019, Theorem 1) and outliers (eq. 7), and it names the first norm
    with a value that is not finite. The columns are `powernorm.records.NORMS_COLUMNS`.

    Call `start_step` before the forward and `finish_step` after the optimizer's step, when the
    running statistics have been updated. In observed steps, operators around each norm keep sums on
    the device, and `finish_step` copies all of them in one transfer. In all other steps the hooks
    only check a flag. No weight, buffer, random number or output changes, except that
    `norm(x, mask, residual)` adds its arguments before its kernel instead of inside it.

    Attach before `torch.compile`; the compiled code has a variant for observed steps. A copy of the
    model (EMA, mean teacher, pickle) is not observed.

    TID and distances are means over the calls of a step (micro-batches, shared modules). Norms of
    gradients are over the tokens of all calls, as of one matrix, with each call's parts from its
    own statistics. They are gradients of the loss that the backward starts from, divided by
    `loss_scale`, so a trainer that divides the loss by the number of accumulated micro-batches
    divides them too. Clipping comes later and does not change them. Gradients at padded positions
    count as far as the loss depends on them; means over tokens divide by the valid ones. With
    GroupScaling in front (`groups`) the parts are those at the batch norm's own input, behind the
    scaling; the whole gradient is that at the layer's input. RegularizedBatchNorm's penalty is in
    the whole gradient only. Evaluation in the middle of a step is not observed.

    Distributed:
        Layers that share their statistics are measured over all processes of their group, in one
        collective per report: attach the monitor on all of these processes or on none. Everything
        else is local to a process. Gradients are those of each process's own loss, before
        averaging.

    Args:
        model: the model to observe; without norms there are no rows.
        every: steps from one observation to the next, or `log`, `log:N` for N observations per
            decade; see `Schedule`.

    Raises:
        InputError: no schedule, or a model that is compiled already.

    Warns:
        RuntimeWarning: the model has norms, but none of them can be observed.
    """

    def __init__(self, model: nn.Module, every: Schedule | int | str) -> None:
        self.schedule = Schedule.of(every)
        self._observing = False
        self._warned = False
        self._records: list[CallRecord] = []
        self._scale: float | Tensor = 1.0
        self._watched = self._find(model)
        if self._watched:
            check_not_compiled(model, "the NormMonitor")
        self.first_nonfinite: str | None = None
        """Name of the first norm in time with a value that is not finite in the last observed
        step: the forward in the order of the calls, then the backward, from the loss down."""
        self._handles: list[RemovableHandle] = []
        for one in self._watched:
            self._handles += one.observer.register_hooks(lambda: self._observing)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Norms under observation, by name."""
        return {one.name: one.observer.module for one in self._watched}

    def start_step(self, step: int, loss_scale: float | Tensor = 1.0) -> None:
        """Prepare for a step, which is observed if it is due.

        Args:
            step: number of the optimizer's step.
            loss_scale: factor of the loss before the backward (float16 training); a tensor causes
                no synchronization with the device.
        """
        self._records.clear()
        self._scale = loss_scale
        self._observing = bool(self._watched) and self.schedule.is_due(step)

    def finish_step(self, step: int) -> list[NormRow]:
        """Return the observations, compared with the current running statistics.

        Args:
            step: as given to `start_step`.

        Returns:
            One row per norm that was called, in the model's order; empty between observations.
            Cells that do not exist (the mean of a norm that does not center, a batch without valid
            tokens, gradients without a backward) are None.
        """
        if not self._observing:
            return []
        self._observing = False
        records, self._records = self._records, []
        if not records:
            self._warn_once(step)
            return []
        with torch.no_grad():
            return self._report(step, records)

    def cancel_step(self) -> None:
        """Discard the current step, if there is one, for example after an exception."""
        self._records.clear()
        self._observing = False

    def detach(self) -> None:
        """Remove the hooks, which leaves the model as it was before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.cancel_step()

    def _find(self, model: nn.Module) -> list[_Watched]:
        found = {id(one.module): one for one in find_norms(model)}
        watched: list[_Watched] = []
        for name, module in modules_by_name(model).items():
            norm = _watched_name(module, found.get(id(module)))
            if norm is not None:
                kind = BatchObserver if isinstance(module, BatchStatisticsNorm) else TokenObserver
                dim = _feature_dim_of(module, found.get(id(module)))
                observer = kind(len(watched), module, self._take, dim)
                watched.append(_Watched(name, norm, observer))
        if found and not watched:
            _warn_of(list(found.values()))
        return watched

    def _take(self, record: CallRecord) -> None:
        # A backward may run after `finish_step`, or through the graph of an earlier step.
        if self._observing:
            self._records.append(record)

    def _report(self, step: int, records: list[CallRecord]) -> list[NormRow]:
        called = sorted({one.layer for one in records})
        records = merge(records, {i: self._watched[i].group_name for i in called})
        more = [tensor for i in called for tensor in _now(self._watched[i].batch_norm)]
        scale = torch.as_tensor(self._scale, dtype=torch.float64, device=records[0].sums.device)
        host, (loss_scale, *now) = fetch_records(records, [scale, *more])
        broken = next((one.layer for one in host if not one.is_finite), None)
        self.first_nonfinite = None if broken is None else self._watched[broken].name
        state = iter(now)
        rows: list[NormRow] = []
        for i in called:
            one = self._watched[i]
            mine = [record for record in host if record.layer == i]
            cells: dict[str, str | int | float | None] = dict.fromkeys(NORMS_COLUMNS)
            cells |= {"step": step, "layer": one.name, "norm": one.norm}
            if one.batch_norm is None:
                cells |= _token_cells(mine, float(loss_scale), one.observer.module)
            else:
                current = [next(state) for _ in range(_num_now(one.batch_norm))]
                cells |= _batch_cells(one.batch_norm, mine, current, float(loss_scale))
            cells |= _finiteness(mine)
            cells["first_nonfinite"] = int(i == broken)
            rows.append(cells)
        return rows

    def _warn_once(self, step: int) -> None:
        # Frozen layers do not train, so a model in which all are frozen needs no warning.
        norms = [one.batch_norm for one in self._watched]
        trains = any(norm is None or not norm.is_frozen for norm in norms)
        if trains and not self._warned:
            self._warned = True
            warnings.warn(
                f"NormMonitor saw none of its {len(self._watched)} layers in step {step}: the "
                "model was compiled before the monitor was attached, was not in training mode, or "
                "start_step came after the forward",
                RuntimeWarning,
                stacklevel=3,
            )


def _warn_of(found: list[FoundNorm]) -> None:
    """Warn why none of the norms of a model can be observed."""
    reasons = [
        f"{one.names[0] or 'the model itself'}: "
        + (one.reason or f"{type(one.module).__name__} of torch normalizes over several tokens")
        for one in found[:3]
    ]
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    warnings.warn(
        "NormMonitor can watch none of the model's norms, so there will be no rows ("
        f"{'; '.join(reasons)}{more})",
        RuntimeWarning,
        stacklevel=4,
    )


def _watched_name(module: nn.Module, found: FoundNorm | None) -> str | None:
    """Return the short name of a norm that can be observed, else None."""
    if isinstance(module, BatchStatisticsNorm):
        return short_name(module)
    if found is None or found.reading is None:
        return None
    # torch's own BatchNorm, GroupNorm and similar norms are not observed.
    foreign = found.reading.kind in ("batch", "channel")
    return None if foreign else name_of_norm(found)


def _feature_dim_of(module: nn.Module, found: FoundNorm | None) -> int:
    """Return the dimension of the features in a norm's input."""
    if isinstance(module, Norm):
        return module.feature_dim
    return LAST if found is None or found.reading is None else found.reading.feature_dim


def _num_now(layer: BatchStatisticsNorm | None) -> int:
    return 0 if layer is None else 2 + layer.centered


def _now(layer: BatchStatisticsNorm | None) -> list[Tensor]:
    """Return the number of non-finite batches and the running statistics after the step."""
    if layer is None:
        return []
    running = Statistics.running(layer)
    mean = [] if running.mean is None else [running.mean]
    return [layer.num_nonfinite_batches, running.square, *mean]


def _batch_cells(
    layer: BatchStatisticsNorm, records: list[CallRecord], now: list[Tensor], scale: float
) -> Cells:
    nonfinite, square, *mean = now
    running = Statistics(mean[0] if mean else None, square)
    seen = BatchStep(layer, records, running, scale)
    cells = seen.cells() | gradient_cells(records, seen.num_tokens, scale)
    return cells | {"num_nonfinite_batches": int(nonfinite)}


def _token_cells(records: list[CallRecord], scale: float, module: nn.Module) -> Cells:
    inputs = [one.sums for one in records if one.kind == "input"]
    if not inputs:
        return gradient_cells(records, 0.0, scale)
    count, _, square, above, values = torch.stack(inputs).sum(0).tolist()
    share = above / values if values else None
    found = gradient_cells(records, count, scale)
    found |= {"input_scale": math.sqrt(square / count) if count else None}
    if not isinstance(module, SaturatingNorm):
        return found | {"outlier_share": share}
    slope = float(next(one.own for one in records if one.kind == "input"))
    return found | {"saturated_share": share, "slope": slope}


def _finiteness(records: list[CallRecord]) -> Cells:
    inputs = [one for one in records if one.kind == "input"]
    gradients = [one for one in records if one.kind == "input gradient"]
    return {
        "nonfinite_input": sum(not one.is_finite for one in inputs),
        "nonfinite_gradient": sum(not one.is_finite for one in gradients),
    }
