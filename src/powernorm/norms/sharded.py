"""Distributed tensors (DTensor), as sequence parallelism feeds them to the norms.

A process normalizes the tokens that it holds; batch statistics are exchanged over the norm's
process group, as for ordinary tensors. Parameters and buffers that `parallelize_module` made
distributed tensors are used by their local values, buffers in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms.feature_dims import shape_without

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_sharded(x: Tensor | None) -> bool:
    """Return whether x is a distributed tensor."""
    # If x is a DTensor its module is already imported; do not import it (1 s) for other tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_values(x: DTensor) -> Tensor:
    """Return the tokens of this process, differentiable."""
    local = x.to_local()
    # An asynchronous tensor becomes a plain one by an operation that is not a view.
    return local if type(local) is Tensor else local.clone()


def _local_part(x: DTensor) -> Tensor:
    with torch.no_grad():
        return x.to_local()


def sharded_like(values: Tensor, x: DTensor) -> Tensor:
    """Return this process's values as a distributed tensor with the placements of x."""
    from torch.distributed.tensor import DTensor

    local = _local_part(x)
    stride = (
        x.stride()
        if values.stride() == local.stride()
        else torch.empty(x.shape, device="meta").stride()
    )
    return DTensor.from_local(
        values, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=stride
    )


def local_mask(mask: Tensor | None, x: DTensor, feature_dim: int) -> Tensor | None:
    """Return the mask of this process's tokens.

    Args:
        mask: distributed as x is; or an ordinary tensor for all tokens of x, which each process
            holds, or for its own.
        x: the input.
        feature_dim: the dimension of x that holds the features.

    Raises:
        InputError: the mask is distributed in another way, or fits neither.
    """
    if mask is None:
        return None
    dim = feature_dim % x.ndim
    if is_sharded(mask):
        placements = _placements_without(x, dim)
        if mask.device_mesh != x.device_mesh or tuple(mask.placements) != placements:  # type: ignore[attr-defined]
            raise InputError(
                f"padding_mask has the placements {tuple(mask.placements)}, expected those "  # type: ignore[attr-defined]
                f"of the input's tokens: redistribute it to {placements}"
            )
        return local_values(mask)  # type: ignore[arg-type]
    whole, own = (shape_without(shape, dim) for shape in (x.shape, _local_part(x).shape))
    if mask.shape == whole:
        return _own_part(mask, x, dim)
    if mask.shape == own:
        return mask
    raise InputError(
        f"padding_mask has shape {tuple(mask.shape)}, expected {whole}, one value for each token "
        f"of the distributed input, or {own}, one for each token of this process"
    )


def check_sharded(name: str, x: DTensor, residual: Tensor | None, feature_dim: int) -> None:
    """Raise an InputError unless a distributed input is sharded by its tokens only.

    Args:
        name: class of the norm.
        x: the input.
        residual: the residual.
        feature_dim: the dimension of x that holds the features.
    """
    for axis, placement in enumerate(x.placements):
        if placement.is_partial():
            raise InputError(
                f"{name} got a distributed tensor that is {placement} over {_axis(x, axis)}, an "
                "unreduced sum: redistribute it to Shard(1) or Replicate() before "
                "the norm"
            )
        if _divided_dim(placement) == feature_dim % x.ndim:
            raise InputError(
                f"{name} got a distributed tensor whose features are sharded ({placement} over "
                f"{_axis(x, axis)}), expected whole tokens: redistribute it to Shard(1) or "
                "Replicate() before the norm"
            )
    if residual is None:
        return
    if (
        not is_sharded(residual)
        or residual.device_mesh != x.device_mesh  # type: ignore[attr-defined]
        or residual.placements != x.placements  # type: ignore[attr-defined]
    ):
        got = getattr(residual, "placements", "an ordinary tensor")
        raise InputError(
            f"residual is {got}, expected a distributed tensor with the input's placements "
            f"{tuple(x.placements)}: redistribute it"
        )


def check_group(name: str, x: DTensor, group: dist.ProcessGroup | None) -> None:
    """Raise an InputError if statistics would count copies of the same tokens.

    Args:
        name: class of the norm.
        x: the input.
        group: the processes that share statistics; None is the default group.
    """
    axes = [axis for axis, one in enumerate(x.placements) if one.is_replicate()]
    mesh = x.device_mesh
    here = mesh.get_coordinate()
    if here is None or not any(mesh.size(axis) > 1 for axis in axes):
        return
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(here))
    copies = set(mesh.mesh[index].flatten().tolist())
    sharing = set(dist.get_process_group_ranks(group))
    if len(copies & sharing) > 1:
        over = " and ".join(_axis(x, axis) for axis in axes if mesh.size(axis) > 1)
        raise InputError(
            f"{name} got a distributed tensor that is replicated over {over}, and shares its "
            f"statistics with processes that hold copies of the same tokens ({sorted(copies)}): "
            "build it with process_group= a group of processes with different tokens, such as "
            'mesh["dp"].get_group(), or with sync=False'
        )


@contextmanager
def local_state(norm: nn.Module, x: DTensor | None = None) -> Iterator[None]:
    """Let a norm compute with the local values of its parameters and buffers in the block.

    Args:
        norm: its tensors may be distributed or ordinary.
        x: the distributed input, which determines how gradients of the parameters add up.

    Raises:
        InputError: a parameter or buffer is sharded; or parameters that learn are ordinary tensors
            and the input is sharded, so their gradients would be those of a part of the tokens.
    """
    kept: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
    try:
        for module in norm.modules():
            parameters, buffers = module._parameters, module._buffers
            kept.append((module, parameters, buffers))
            module.__dict__["_parameters"] = _each(parameters, lambda p: _local_parameter(p, x))
            module.__dict__["_buffers"] = _each(buffers, _local_buffer)
        yield
    finally:
        for module, parameters, buffers in kept:
            module.__dict__.update(_parameters=parameters, _buffers=buffers)


def _each(
    tensors: dict[str, Any], function: Callable[[Tensor], Tensor]
) -> dict[str, Tensor | None]:
    return {name: None if one is None else function(one) for name, one in tensors.items()}


def _local_parameter(parameter: Tensor, x: DTensor | None) -> Tensor:
    from torch.distributed.tensor import Partial, Replicate

    if not is_sharded(parameter):
        if x is not None and parameter.requires_grad and _is_divided(x):
            raise InputError(
                f"a distributed input {tuple(x.placements)} met an ordinary parameter, whose "
                "gradient would be that of this process's tokens: give the norm a plan of "
                "parallelize_module, such as SequenceParallel()"
            )
        return parameter
    distributed: DTensor = parameter  # type: ignore[assignment]
    _check_whole(distributed)
    if x is None or not torch.is_grad_enabled():
        return distributed.to_local()
    if distributed.device_mesh != x.device_mesh:
        raise InputError(
            f"a norm's parameter is distributed over {distributed.device_mesh}, and its input over "
            f"{x.device_mesh}: parallelize both over one mesh"
        )
    partial = [Replicate() if one.is_replicate() else Partial() for one in x.placements]
    # The redistribution changes nothing here; its backward adds the processes' gradients and
    # gives the result the parameter's placements.
    whole = distributed.redistribute(placements=distributed.placements)
    return whole.to_local(grad_placements=partial)


def _local_buffer(buffer: Tensor) -> Tensor:
    if not is_sharded(buffer):
        return buffer
    _check_whole(buffer)  # type: ignore[arg-type]
    with torch.no_grad():  # the tensor itself, not a view: it is updated in place
        return buffer.to_local()  # type: ignore[attr-defined, no-any-return]


def _check_whole(tensor: DTensor) -> None:
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise InputError(
            f"a norm's parameter or buffer has the placements {tuple(tensor.placements)}, expected "
            "Replicate(): a norm needs all its features, give it the plan SequenceParallel()"
        )


def _is_divided(x: DTensor) -> bool:
    return any(
        x.device_mesh.size(axis) > 1 and not placement.is_replicate()
        for axis, placement in enumerate(x.placements)
    )


def _divided_dim(placement: Placement) -> int | None:
    return getattr(placement, "dim", None)


def _axis(x: DTensor, axis: int) -> str:
    names = x.device_mesh.mesh_dim_names
    name = f"the mesh dimension {axis}" if names is None else f"the mesh dimension {names[axis]!r}"
    return f"{name} ({x.device_mesh.size(axis)} processes)"


def _placements_without(x: DTensor, dim: int) -> tuple[Placement, ...]:
    """Return the placements of a tensor with the shape of x without a dimension."""
    from torch.distributed.tensor import Shard

    return tuple(
        Shard(at - 1) if (at := _divided_dim(one)) is not None and at > dim else one
        for one in x.placements
    )


def _own_part(mask: Tensor, x: DTensor, dim: int) -> Tensor:
    """Return the part of a mask for all tokens that belongs to this process's."""
    from torch.distributed.tensor import distribute_tensor

    # All processes hold the mask, so none has to send it.
    placements = _placements_without(x, dim)
    return distribute_tensor(mask, x.device_mesh, placements, src_data_rank=None).to_local()
