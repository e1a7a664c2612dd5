"""The static norms of a model, and what they compute in evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm, find_norms, wrapped_batch_norm
from powernorm.norms import BatchStatisticsNorm, Norm
from powernorm.norms.adapted import AdaptedNorm
from powernorm.surgery.solution import Static

TORCH_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Place:
    """A norm of a model where it is computed."""

    name: str
    """Of the module that computes: of a wrapper around a BatchNorm1d, the one inside."""
    module: nn.Module
    found: FoundNorm


def norms_of(model: nn.Module) -> tuple[Place, ...]:
    """The norms of a model in its order, each once, as `find_norms` knows them."""
    places = []
    for found in find_norms(model):
        inner, name = wrapped_batch_norm(found.module), found.names[0]
        if inner is not None:
            attribute = next(key for key, part in found.module._modules.items() if part is inner)
            name = f"{name}.{attribute}"
        places.append(Place(name, inner or found.module, found))
    return tuple(places)


def has_own_ways(norm: nn.Module) -> bool:
    """Does a call of the norm do more than its class says?"""
    return bool("forward" in norm.__dict__ or norm._forward_hooks or norm._forward_pre_hooks)


def why_not_static(place: Place) -> str:
    """Why a norm is no affine map per feature."""
    if place.found.function:
        return f"{place.found.reason.partition(':')[0]}, which depends on each token in evaluation"
    if isinstance(place.module, (*TORCH_BATCH_NORMS, nn.InstanceNorm1d)):
        return "without running statistics it depends on the batch in evaluation"
    if isinstance(place.module, AdaptedNorm):
        return (
            "it does not say that it is an affine map per feature in evaluation (is_static = True)"
        )
    return "it depends on each token in evaluation"


def feature_axis(norm: nn.Module) -> int:
    """The dimension of the features in the input of a norm that may be static."""
    return norm.feature_dim if isinstance(norm, Norm) else 1


def statics_of(model: nn.Module) -> dict[str, Static]:
    """The static norms by name.

    Raises:
        InputError: one of them has never seen a batch, or its scales are not finite.
    """
    found = {}
    for place in norms_of(model):
        name, norm = place.name, place.module
        static = None if place.found.function else static_of(norm)
        if static is None:
            continue
        counted = norm.layer if isinstance(norm, AdaptedNorm) else norm
        tracked = getattr(counted, "num_batches_tracked", None)
        if tracked is not None and int(tracked) == 0:
            raise InputError(
                f"the statistics of {name!r} ({type(norm).__name__}) have never seen a batch: "
                "train the model, or call powernorm.calibrate(model, batches) first"
            )
        for what, value in (("scale", static.scale), ("shift", static.shift)):
            wrong = int((~value.isfinite()).sum())
            if wrong:
                raise InputError(
                    f"the {what} of {name!r} ({type(norm).__name__}) is not finite in {wrong} of "
                    f"{len(value)} features: its weights or statistics are broken, calibrate or "
                    "train again"
                )
        found[name] = static
    return found


def static_of(norm: nn.Module) -> Static | None:
    """Scale and shift of a static norm in evaluation, None for everything else."""
    if isinstance(norm, Norm):
        if not norm.is_static:
            return None
        scale, shift = norm.affine()
        return Static(scale.detach().cpu(), shift.detach().cpu())
    if isinstance(norm, TORCH_BATCH_NORMS) and norm.running_var is not None:
        assert norm.running_mean is not None
        scale = torch.rsqrt(norm.running_var.double() + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight.double()
        shift = -scale * norm.running_mean.double()
        if norm.bias is not None:
            shift = shift + norm.bias.double()
        return Static(scale.detach().cpu(), shift.detach().cpu())
    return None


def hides_padding(norm: nn.Module) -> bool:
    """Does the norm set padding to 0 in evaluation? With a mask that is no affine map."""
    return isinstance(norm, BatchStatisticsNorm) and norm.floor
