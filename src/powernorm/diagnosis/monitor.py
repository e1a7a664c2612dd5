"""Watching batch statistics while a model trains, at a cost that does not show."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.diagnosis.distances import Statistics, discrepancies, fluctuations
from powernorm.errors import InputError
from powernorm.norms.observation import check_not_compiled, observed_layers, short_name, watch
from powernorm.ops.moments import Moments

NormRow = Mapping[str, str | int | float | None]
"""One layer at one step, by `powernorm.runs.NORMS_COLUMNS`."""

_QUANTITIES: Final = ("mean_tid", "var_tid", "mean_distance", "var_distance")


class NormMonitor:
    """Online TID and statistic fluctuations of every layer with batch statistics.

    Call `start_step` before the forward and `finish_step` after the optimiser's step, when the
    running statistics have moved. Every `every`-th step the hooks keep the moments of the batch on
    its device; `finish_step` compares them with the running statistics and fetches all numbers
    in one transfer. In between the hooks only look at a flag.

    Attach before `torch.compile`; a region that is compiled and checkpointed at once refuses the
    hooks (torch says so at the first observed step). A layer that is called several times in a
    step (micro-batches, shared modules) gives the mean over its calls. Evaluation in the middle
    of a step is not seen. Under data-parallel training the batch is that of this process.

    Args:
        model: holds layers of `BatchStatisticsNorm`; without any there are no rows.
        every: steps from one observation to the next, ≥ 1.

    Raises:
        InputError: `every` below 1, or a model that is compiled already.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        if every < 1:
            raise InputError(f"every is {every}, expected a number of steps of at least 1")
        self.layers = observed_layers(model)
        if self.layers:
            check_not_compiled(model, "the NormMonitor")
        self.every = every
        self._names = {name: short_name(layer) for name, layer in self.layers.items()}
        self._armed = False
        self._warned = False
        self._seen: dict[str, list[Moments]] = {}
        self._handles: list[RemovableHandle] = [
            watch(layer, partial(self._keep, name), lambda: self._armed)
            for name, layer in self.layers.items()
        ]

    def start_step(self, step: int) -> None:
        """Gets ready for a step; observes it when it is due.

        Args:
            step: number of the optimiser's step.
        """
        self._seen.clear()
        self._armed = step % self.every == 0

    def finish_step(self, step: int) -> list[NormRow]:
        """Compares the step's batches with the running statistics as they are now.

        Args:
            step: as given to `start_step`.

        Returns:
            One row a layer that was called, empty between observations. Cells that do not exist
            (the mean of a norm that does not centre, a batch without valid tokens) are None.
        """
        if not self._armed:
            return []
        self._armed = False
        seen, self._seen = self._seen, {}
        if not seen:
            self._warn_once(step)
            return []
        with torch.no_grad():
            measured = [self._measure(name, batches) for name, batches in seen.items()]
            device = measured[0].device
            table: list[list[float]] = torch.stack([row.to(device) for row in measured]).tolist()
        return [self._row(step, name, cells) for name, cells in zip(seen, table, strict=True)]

    def detach(self) -> None:
        """Removes the hooks; the model is as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        self._armed = False

    def _keep(self, name: str, moments: Moments) -> None:
        self._seen.setdefault(name, []).append(moments)

    def _measure(self, name: str, batches: list[Moments]) -> Tensor:
        """The quantities, the number of batches with tokens, the non-finite count: (6,)."""
        layer = self.layers[name]
        running = Statistics.running(layer)
        sums = running.square.new_zeros(len(_QUANTITIES) + 1)
        for batch in batches:
            measured = (*discrepancies(batch, running, layer.eps), *fluctuations(batch, running))
            values = torch.stack([*measured, torch.ones_like(batch.count)])
            sums = sums + torch.where(batch.count > 0, values, 0.0)
        return torch.cat([sums, layer.num_nonfinite_batches.double().reshape(1)])

    def _row(self, step: int, name: str, cells: list[float]) -> NormRow:
        *sums, count, nonfinite = cells
        layer = self.layers[name]
        row: dict[str, str | int | float | None] = {
            "step": step,
            "layer": name,
            "norm": self._names[name],
        }
        for quantity, value in zip(_QUANTITIES, sums, strict=True):
            exists = count > 0 and (layer.centered or not quantity.startswith("mean"))
            row[quantity] = value / count if exists else None
        row["num_nonfinite_batches"] = int(nonfinite)
        return row

    def _warn_once(self, step: int) -> None:
        # Frozen layers are none in training; nothing is wrong where all of them are.
        trains = any(not layer.is_frozen for layer in self.layers.values())
        if trains and not self._warned:
            self._warned = True
            warnings.warn(
                f"NormMonitor saw none of its {len(self.layers)} layers in step {step}: the model "
                "was compiled before the monitor was attached, was not in training mode, or "
                "start_step came after the forward",
                RuntimeWarning,
                stacklevel=3,
            )
