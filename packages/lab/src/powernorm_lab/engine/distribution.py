"""One model in several processes: replicated (DDP), or with sharded weights (FSDP2)."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powernorm_lab.engine.processes import num_processes, replicated


def optimized(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def divide_weights(model: nn.Module, device: torch.device) -> None:
    """Shard the weights of each layer, then the remaining ones, among the processes (FSDP2).

    Running statistics of norms are buffers, which FSDP2 does not shard.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (num_processes(),))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def synchronized(module: nn.Module) -> nn.Module:
    """Return a module whose backward averages the gradients over the processes.

    It is the module itself in a single process, and with sharded weights, whose backward averages
    already.
    """
    return module if is_divided(module) else replicated(module)


def accumulating(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context without the gradient averaging of a `synchronized` module."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Gather the sharded weights of a model in every process, to evaluate it.

    Inside the context each process may call the layers, or their methods, any number of times.
    """
    parts = list(_divided(model))
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        yield
    finally:
        for part in parts:
            # The default of `fully_shard`: only the root keeps its weights until the backward.
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers in the first process; every process must call it."""
    if not is_divided(model):
        return dict(model.state_dict())
    weights: dict[str, Any] = dict(_whole("get_model_state_dict")(model))
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers from whole tensors, which every process has."""
    if is_divided(model):
        _whole("set_model_state_dict")(model, dict(weights))
    else:
        model.load_state_dict(weights)


def whole_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the whole state of an optimizer in the first process; every process must call it.

    Parameters are numbered group by group, as in `Optimizer.state_dict`.
    """
    if not is_divided(model):
        return dict(optimizer.state_dict())
    named = _whole("get_optimizer_state_dict")(model, optimizer)
    if not named:
        return {}
    numbers = {name: number for number, name in enumerate(_names(optimizer, model))}
    return _renamed(dict(named), numbers)


def load_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Any]
) -> None:
    """Restore the state that `whole_state` returned, which every process has."""
    if not is_divided(model):
        optimizer.load_state_dict(dict(state))
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    names = dict(zip(numbers, _names(optimizer, model), strict=True))
    _whole("set_optimizer_state_dict")(model, optimizer, _renamed(state, names))


def is_divided(module: nn.Module) -> bool:
    """Return whether the weights are sharded among the processes."""
    return any(True for _ in _divided(module))


def _divided(model: nn.Module) -> Iterator[Any]:
    """Yield the modules with sharded weights; there are none if nothing has imported FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield from (part for part in model.modules() if isinstance(part, fsdp.FSDPModule))


def _whole(function: str) -> partial[Any]:
    """Return a function of torch's sharded state, for whole tensors.

    Its import takes a second, which a run in one process need not wait for.
    """
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return partial(getattr(state_dict, function), options=options)


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in optimized(optimizer)]


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with its parameters renamed."""
    return {
        "state": {names[name]: values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }
