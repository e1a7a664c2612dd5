"""Statistics over whole data sets, measured on the inputs of evaluating layers, and written."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.inspection.modules import listed
from powernorm.inspection.observer import NormCall, observe
from powernorm.norms import BatchStatisticsNorm, MovingAverageBatchNorm, Norm, UnifiedNorm
from powernorm.ops.moments import Moments
from powernorm.ops.processes import all_reduce_sum, group_name_of

Buffers = Mapping[str, Tensor]


@contextmanager
def evaluating(layers: Mapping[str, Norm], look: Callable[[NormCall], None]) -> Iterator[None]:
    """Let all layers evaluate in the block, and pass each call to `look` before it runs."""

    def before(call: NormCall) -> None:
        # Between its calls a layer is in training mode: swapped models pass their mask to norms
        # only if some of them train.
        call.module.training = False
        look(call)

    def after(name: str, output: object) -> None:
        del output
        layers[name].training = True

    with observe(layers, on_input=before, on_output=after):
        yield


@contextmanager
def evaluating_by_batches(layers: Mapping[str, BatchStatisticsNorm]) -> Iterator[None]:
    """Let all layers evaluate in the block, each call by its own statistics, for every norm.

    Training mode would not work: some norms normalize by running statistics in training too. The
    layers' buffers are written, and the caller restores them.
    """

    def take_over(call: NormCall) -> None:
        adopt_batch(layers[call.name], call.moments())

    with evaluating(layers, take_over):
        yield


def group_of(layer: Norm) -> str:
    """Return the name of the process group that a layer's sums are merged over.

    Of a norm without statistics it is the default group.
    """
    if isinstance(layer, BatchStatisticsNorm):
        return layer.group_name
    return group_name_of(None, sync=True)


def device_of(layer: Norm) -> torch.device:
    """Return the device of a layer, which has buffers or parameters."""
    return next(chain(layer.buffers(), layer.parameters())).device


def order_of_calls(
    layers: Mapping[str, Norm],
    called: Iterable[str],
    batches: str,
    optional: Container[str] = (),
) -> list[str]:
    """Return the names of the layers in the order of their first calls, equal in all processes.

    Args:
        layers: layers by name.
        called: names in the order of their first calls here; empty in a process without data.
        batches: text of the error about missing calls ("no batch went").
        optional: names of layers that need not have been called, and are then left out.

    Raises:
        InputError: no process has called one of the other layers, or any layer; raised in all
            processes.

    Distributed:
        One exchange per layer, in the order of `layers`; all processes have to call this function.
    """
    last = len(layers)
    positions = {name: float(index) for index, name in enumerate(called)}
    mean: dict[str, float] = {}
    for name, layer in layers.items():
        start = [positions.get(name, last), 1.0]
        place = torch.tensor(start, dtype=torch.float64, device=device_of(layer))
        total, size = all_reduce_sum(place, group_of(layer)).tolist()
        mean[name] = total / size
    uncalled = [name for name, place in mean.items() if place == last]
    if len(uncalled) == last or any(name not in optional for name in uncalled):
        raise InputError(
            f"{batches} through {listed(uncalled)} of the {last} chosen layers: "
            "give a  `forward` that runs the whole model, or leave layers out by `names`"
        )
    return sorted((name for name in mean if name not in uncalled), key=lambda name: mean[name])


def check_not_empty(num_batches: int, layers: Mapping[str, Norm]) -> None:
    """Raise an InputError if there was no batch, unless other processes may have had some."""
    if not num_batches and not any(map(group_of, layers.values())):
        raise InputError("batches is empty: give data, best dozens of batches")


def statistics_of(layer: BatchStatisticsNorm, moments: Moments, *, unbiased: bool) -> Buffers:
    """Return the buffers that the layer evaluates by, in float64."""
    if not layer.centered:
        return {"running_second_moment": moments.second_moment}
    var = layer.running_target(moments.var, moments.count) if unbiased else moments.var
    return {"running_mean": moments.mean, "running_var": var}


evaluated_statistics: Final = partial(statistics_of, unbiased=True)
"""`statistics_of` a population as evaluation uses them."""


def write_statistics(
    layer: BatchStatisticsNorm, statistics: Buffers, wanted: Tensor | None = None
) -> None:
    """Write a layer's buffers in place; if `wanted` (0-d) is given, only if it is true."""
    for name, value in statistics.items():
        buffer = layer.get_buffer(name)
        value = value.to(buffer.dtype)
        buffer.copy_(value if wanted is None else torch.where(wanted, value, buffer))


def adopt_batch(layer: BatchStatisticsNorm, moments: Moments) -> None:
    """Write a batch's own statistics, which all norms can evaluate by, if it has a valid token."""
    write_statistics(layer, statistics_of(layer, moments, unbiased=False), moments.count > 0)


@torch.no_grad()
def adopt_statistics(layer: BatchStatisticsNorm, statistics: Buffers) -> None:
    """Write a layer's buffers permanently: it counts as trained from now on."""
    write_statistics(layer, statistics)
    windowed = MovingAverageBatchNorm | UnifiedNorm
    # A window before the first step would hold initial values.
    if isinstance(layer, windowed) and not layer.num_batches_tracked:
        layer.window_second_moment.copy_(layer.running_second_moment)
    layer.num_batches_tracked.clamp_(min=1)


def check_population(name: str, layer: Norm, moments: Moments) -> None:
    """Raise an InputError unless the population's statistics can be used for evaluation.

    Of a norm without statistics, unless they are finite.
    """
    if not moments.count:
        raise InputError(
            f"the batches hold no valid token for layer {name!r}: every position is padding; check "
            "that padding_mask is True at padding, not at tokens"
        )
    values = [moments.second_moment]
    if isinstance(layer, BatchStatisticsNorm):
        buffers = evaluated_statistics(layer, moments)
        values = [value.to(layer.get_buffer(key).dtype) for key, value in buffers.items()]
    finite = torch.stack([torch.isfinite(value) for value in values]).all(0)
    num_bad = int((~finite).sum())
    if num_bad:
        raise InputError(
            f"the statistics of layer {name!r} are not finite in {num_bad} of its "
            f"{layer.num_features} features: look for NaN or infinity in the data or in the "
            "layers before it"
        )
