"""γ of every norm layer against the deviation of its batches (Shen et al. 2020, App. B.1)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.inspection.batches import Forward
from powernorm.inspection.modules import batch_layers
from powernorm.inspection.observer import NormCall, observe
from powernorm.norms.preserved_state import preserved_state
from powernorm.runs import ScaleRecord


def norm_scales(model: nn.Module, batches: Iterable[Any], forward: Forward) -> list[ScaleRecord]:
    """Return γ and the mean deviation of the batches, feature by feature.

    Lemma 2 of Shen et al. makes the loss smoother where |γ| ≤ ψ_B. The norm layers normalize as in
    training and everything else as in evaluation; the model is as before afterwards.

    Args:
        model: layers with batch statistics and a weight get a record, in the order of the calls.
        batches: on the model's device.
        forward: runs the model on a batch.
    """
    layers = batch_layers(model)
    deviations: dict[str, list[Tensor]] = {}

    def keep(call: NormCall) -> None:
        layer = layers[call.name]
        if layer.training:
            moments = call.moments()
            square = moments.var if layer.centered else moments.second_moment
            deviations.setdefault(call.name, []).append(square.sqrt())

    with observe(layers, on_input=keep), preserved_state(model, layers.values()):
        for batch in batches:
            forward(model, batch)
    return [
        ScaleRecord(
            layer=name,
            weight=weight.detach().float().cpu().tolist(),
            deviation=torch.stack(values).mean(0).float().cpu().tolist(),
        )
        for name, values in deviations.items()
        if (weight := layers[name].weight) is not None
    ]
