"""Loss of a trained model under other statistics: re-estimated ones, and the batch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, check_repeatable
from powernorm.inspection.modules import batch_layers
from powernorm.norms.arguments import check_function, check_model
from powernorm.norms.preserved_state import preserved_state
from powernorm.records import SMALLEST_GAP, EvaluationRow
from powernorm.surgery.calibration import calibrate
from powernorm.surgery.populations import evaluating_by_batches
from powernorm.surgery.stand_ins import torch_batch_norms_replaced

Loss = Callable[[nn.Module, Any], Tensor | float | tuple[Tensor | float, int]]
"""Function that runs the model on a batch; returns its mean loss, or (mean loss, tokens)."""

RUNNING: Final = "running"
REESTIMATED: Final = "re-estimated"
REESTIMATED_AT_ONCE: Final = "re-estimated in one pass"
BATCH: Final = "batch"


def _check_loss(loss: object) -> None:
    check_function("loss", loss)
    if loss is None:
        raise InputError("loss is None, expected a function of (model, batch)")


def mean_loss(model: nn.Module, batches: Iterable[Any], loss: Loss) -> float:
    """Return the mean loss over all batches, weighted by their tokens if `loss` returns them.

    Raises:
        InputError: there is no batch, or no token in any.
    """
    total, weight = 0.0, 0
    for batch in batches:
        given = loss(model, batch)
        value, count = given if isinstance(given, tuple) else (given, 1)
        total += float(value) * count
        weight += count
    if not weight:
        raise InputError("the batches to evaluate are empty: give at least one with a token")
    return total / weight


def evaluate_statistics(
    model: nn.Module,
    loss: Loss,
    population: Iterable[Any],
    evaluation: Iterable[Any],
    *,
    forward: Forward | None = None,
    by_batch: Mapping[int, Iterable[Any]] | None = None,
) -> tuple[EvaluationRow, ...]:
    """Return the losses of a trained model by running, re-estimated and batch statistics.

    Wang et al. 2022, Tables 7 and 8: if a model is much better by the statistics of test batches
    than by its running ones, the gap between training and evaluation comes from the statistics. The
    share that re-estimation closes shows whether the running statistics were badly estimated or the
    batches differ. `powernorm.calibrate` re-estimates, layer by layer (the network as it evaluates)
    and in one pass (as the paper does). Everything else runs as in evaluation. Weights, buffers,
    modes and torch's random numbers are unchanged afterwards.

    Args:
        model: a model with batch statistics.
        loss: loss of the model on a batch of `evaluation`, see `Loss`.
        population: training batches to re-estimate from, as `powernorm.calibrate` takes them; read
            several times.
        evaluation: batches of held-out data; read several times.
        forward: runs the model on a batch of `population`; see `powernorm.calibrate`.
        by_batch: the held-out data in batches of several sizes, by their number of tokens. None
            uses `evaluation` as it is.

    Returns:
        Rows `running`, `re-estimated`, `re-estimated in one pass`, and one `batch` per size.

    Raises:
        InputError: no layer with batch statistics, data that can be read only once, or as in
            `powernorm.calibrate`.
    """
    _check_loss(loss)
    check_repeatable(evaluation, "several")
    sizes: Mapping[int | None, Iterable[Any]] = (
        {None: evaluation} if by_batch is None else _checked(by_batch)
    )

    def evaluate(statistics: str, tokens: int | None) -> EvaluationRow:
        batches = sizes[tokens] if statistics == BATCH else evaluation
        return EvaluationRow(
            statistics=statistics, tokens=tokens, loss=mean_loss(model, batches, loss)
        )

    return evaluate_each(model, evaluate, population, sizes, forward=forward)


def evaluate_each(
    model: nn.Module,
    evaluate: Callable[[str, int | None], EvaluationRow],
    population: Iterable[Any],
    sizes: Iterable[int | None],
    *,
    forward: Forward | None = None,
    is_evaluated_by_batch: Callable[[str], bool] | None = None,
) -> tuple[EvaluationRow, ...]:
    """Return the results of `evaluate` for a model under each kind of statistics.

    Args:
        model: a model with batch statistics.
        evaluate: called with a kind of statistics (`RUNNING`, `REESTIMATED`,
            `REESTIMATED_AT_ONCE`, `BATCH`) and, for `BATCH`, a size, while the model evaluates by
            these.
        population: training batches to re-estimate from.
        sizes: batch sizes, for each of which `evaluate` is called.
        forward: runs the model on a batch of `population`.
        is_evaluated_by_batch: tells by name which layers normalize by the batch for `BATCH`; the
            others use running statistics. None means all.

    Raises:
        InputError: no layer with batch statistics, or as in `powernorm.calibrate`.
    """
    check_model(model)
    with torch_batch_norms_replaced(model):
        layers = batch_layers(model)
        if not layers:
            raise InputError(
                f"{type(model).__name__} has no layer with batch statistics, so there are none to "
                "re-estimate; powernorm.diagnose measures those that other norms would have"
            )
        check_repeatable(population, "several")
        with preserved_state(model, ()):
            rows = [evaluate(RUNNING, None)]
            # All layers, because the cost of re-estimation is measured.
            calibrate(model, population, forward, names="*")
            rows.append(evaluate(REESTIMATED, None))
            calibrate(model, population, forward, names="*", way="one_pass")
            rows.append(evaluate(REESTIMATED_AT_ONCE, None))
        by_batch = is_evaluated_by_batch or bool
        chosen = {name: layer for name, layer in layers.items() if by_batch(name)}
        with preserved_state(model, chosen.values()), evaluating_by_batches(chosen):
            return (*rows, *(evaluate(BATCH, size) for size in sizes))


@dataclass(frozen=True)
class EvaluationGap:
    """Mean losses of the same batches in evaluation.

    Attributes:
        running_loss: loss with the running statistics.
        batch_loss: loss with those of each batch.
    """

    running_loss: float
    batch_loss: float

    @property
    def gap(self) -> float:
        """Amount that the running statistics add to the loss."""
        return self.running_loss - self.batch_loss


def evaluation_gap(model: nn.Module, batches: Iterable[Any], loss: Loss) -> EvaluationGap | None:
    """Return the losses in evaluation by running statistics and by the batch's own.

    The two differ in the statistics only: PowerNorm and MABN, which normalize by running statistics
    in training too, use those of the batch here, and dropout is off. Weights, buffers, modes and
    torch's random numbers are unchanged afterwards.

    Args:
        model: a model in any mode.
        batches: read twice.
        loss: returns the mean loss of the model on a batch, or (mean loss, number of tokens), which
            then weights the batches.

    Returns:
        None for a model without batch statistics.

    Raises:
        InputError: no batches, batches that can be read only once, or a loss that is not a
            function.

    Distributed:
        The statistics are those of this process's batches; nothing is exchanged.
    """
    check_model(model)
    _check_loss(loss)
    with torch_batch_norms_replaced(model):
        layers = batch_layers(model)
        if not layers:
            return None
        check_repeatable(batches, "two")
        with preserved_state(model, ()):
            running = mean_loss(model, batches, loss)
        # A swapped model passes its mask to its norms only while some of them train.
        with preserved_state(model, layers.values()), evaluating_by_batches(layers):
            return EvaluationGap(running, mean_loss(model, batches, loss))


def closed_share(rows: Iterable[EvaluationRow]) -> float | None:
    """Return the share of the gap between running and batch statistics that re-estimation closes.

    It is (running - re-estimated) / (running - batch), for the largest batches: above 1 if
    re-estimated statistics are better than the batches', below 0 if they are worse than the
    running ones.

    Returns:
        None without a gap: batch statistics are not better by 0.1 % of the loss, or a loss is not
        finite.
    """
    losses = {row["statistics"]: row["loss"] for row in rows}
    running, new, batch = (losses.get(name) for name in (RUNNING, REESTIMATED, BATCH))
    if running is None or new is None or batch is None:
        return None
    if not all(map(math.isfinite, (running, new, batch))):
        return None
    gap = running - batch
    return (running - new) / gap if gap > SMALLEST_GAP * abs(running) else None


def _checked(by_batch: object) -> dict[int | None, Iterable[Any]]:
    if not isinstance(by_batch, Mapping):
        raise InputError(
            f"by_batch is {by_batch!r}, expected a dictionary of batches by number of tokens"
        )
    for batches in by_batch.values():
        check_repeatable(batches, "several")
    return dict(sorted(by_batch.items()))
