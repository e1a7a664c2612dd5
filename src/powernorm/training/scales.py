"""γ of every norm layer against the deviation of its batches (Shen et al. 2020, App. B.1)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.observation import Forward, observed_layers, watch
from powernorm.norms.preserved_state import preserved_state
from powernorm.ops.moments import Moments
from powernorm.runs import ScaleRecord


def norm_scales(model: nn.Module, batches: Iterable[Any], forward: Forward) -> list[ScaleRecord]:
    """Return γ and the mean deviation of the batches, feature by feature.

    Lemma 2 of Shen et al. makes the loss smoother where |γ| ≤ ψ_B. The norm layers normalise as in
    training and everything else as in evaluation; the model is as before afterwards.

    Args:
        model: layers with batch statistics and a weight get a record, in the order of the calls.
        batches: on the model's device.
        forward: runs the model on a batch.
    """
    layers = observed_layers(model)
    deviations: dict[str, list[Tensor]] = {}
    handles = [
        watch(layer, partial(_keep, deviations.setdefault, name, layer), lambda: True)
        for name, layer in layers.items()
    ]
    try:
        with preserved_state(model, layers.values()):
            for batch in batches:
                forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [
        ScaleRecord(
            layer=name,
            weight=weight.detach().float().cpu().tolist(),
            deviation=torch.stack(values).mean(0).float().cpu().tolist(),
        )
        for name, values in deviations.items()
        if (weight := layers[name].weight) is not None
    ]


def _keep(
    entry: Callable[[str, list[Tensor]], list[Tensor]],
    name: str,
    layer: BatchStatisticsNorm,
    moments: Moments,
) -> None:
    """Append σ_B of a layer that centres, ψ_B of one that does not."""
    square = moments.var if layer.centered else moments.second_moment
    entry(name, []).append(square.sqrt())
