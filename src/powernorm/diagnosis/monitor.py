"""Monitor of the norms of a model in training, at a negligible cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.diagnosis.observers import BatchObserver, CallRecord, TokenObserver
from powernorm.diagnosis.schedules import Schedule
from powernorm.diagnosis.targets import name_of_norm
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.modules import check_not_compiled, modules_by_name
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.registry import short_name
from powernorm.ops.processes import all_reduce_sum
from powernorm.records import NORMS_COLUMNS

NormRow = Mapping[str, str | int | float | None]
"""Values of one layer at one step, keyed by `powernorm.records.NORMS_COLUMNS`."""


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
            self._handles += one.register_hooks(lambda: self._observing)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """Norms under observation, by name."""
        return {one.name: one.module for one in self._watched}

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

    def _find(self, model: nn.Module) -> list[TokenObserver]:
        found = {one.module: one for one in find_norms(model)}
        watched: list[TokenObserver] = []
        kind: type[TokenObserver]
        for name, module in modules_by_name(model).items():
            one = found.get(module)
            if isinstance(module, BatchStatisticsNorm):
                kind, norm, dim = BatchObserver, short_name(module), module.feature_dim
            # torch's own BatchNorm, GroupNorm and similar norms are not observed.
            elif one and one.reading and one.reading.kind not in ("batch", "channel"):
                kind, norm, dim = TokenObserver, name_of_norm(one), one.reading.feature_dim
            else:
                continue
            watched.append(kind(len(watched), name, norm, module, self._take, dim))
        if found and not watched:
            _warn_of(list(found.values()))
        return watched

    def _take(self, record: CallRecord) -> None:
        # A backward may run after `finish_step`, or through the graph of an earlier step.
        if self._observing:
            self._records.append(record)

    def _report(self, step: int, records: list[CallRecord]) -> list[NormRow]:
        called = [self._watched[i] for i in sorted({one.layer for one in records})]
        records = _merged(records, {one.layer: one.group_name for one in called})
        scale = torch.as_tensor(self._scale, dtype=torch.float64, device=records[0].sums.device)
        more = [scale, *(one.state() for one in called)]
        host, (loss_scale, *states) = _fetched(records, more)
        broken = next((one.layer for one in host if not one.is_finite), None)
        self.first_nonfinite = None if broken is None else self._watched[broken].name
        rows: list[NormRow] = []
        for one, state in zip(called, states, strict=True):
            mine = [record for record in host if record.layer == one.layer]
            row: dict[str, str | int | float | None] = dict.fromkeys(NORMS_COLUMNS)
            row |= {"step": step, "layer": one.name, "norm": one.norm}
            row |= one.cells(mine, state, float(loss_scale))
            rows.append(row | {"first_nonfinite": int(one.layer == broken)})
        return rows

    def _warn_once(self, step: int) -> None:
        # Frozen layers do not train, so a model in which all are frozen needs no warning.
        norms = [one.module for one in self._watched]
        trains = any(not isinstance(x, BatchStatisticsNorm) or not x.is_frozen for x in norms)
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


def _merged(records: Sequence[CallRecord], groups: Mapping[int, str]) -> list[CallRecord]:
    """Return the records summed over the processes of each group, with one collective per group.

    Args:
        records: records of this process; every process of a group has the same calls.
        groups: name of the process group of each layer, `""` for none.
    """
    merged = list(records)
    for group in sorted(set(groups.values()) - {""}):
        # Autograd's order may differ between processes; that of one layer's calls is fixed.
        members = [i for i, one in enumerate(records) if groups[one.layer] == group]
        members.sort(key=lambda i: (records[i].layer, records[i].kind, i))
        flat = torch.cat([records[i].sums.flatten() for i in members])
        parts = all_reduce_sum(flat, group).split([records[i].sums.numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            merged[i] = replace(records[i], sums=part.view_as(records[i].sums))
    return merged


def _fetched(
    records: Sequence[CallRecord], more: Sequence[Tensor]
) -> tuple[list[CallRecord], list[Tensor]]:
    """Return records and other tensors on the host in float64, copied in one transfer."""
    number, device = len(records), records[0].sums.device
    tensors = [*(one.sums for one in records), *(one.own for one in records), *more]
    flat = torch.cat([tensor.reshape(-1).to(device, torch.float64) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    host = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    fetched = [
        # A float64 sum of such sums does not overflow, and NaN and infinity stay.
        replace(one, sums=sums, own=own, is_finite=math.isfinite(float(sums.sum())))
        for one, sums, own in zip(records, host, host[number : 2 * number], strict=False)
    ]
    return fetched, host[2 * number :]
