"""Dividing the weights of a model among processes."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard


def shard_weights(model: nn.Module, mesh: Any) -> None:
    """Divide each layer's weights, then the rest, among the processes of a mesh (FSDP2).

    Norms keep their running statistics whole in every process: they are buffers.
    """
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
