"""Construction of a new norm that takes over the state of the norm that it replaces."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm
from powernorm.inspection.reading import Reading
from powernorm.norms import (
    BatchStatisticsNorm,
    LayerNorm,
    Norm,
    ProgressiveRepBatchNorm,
    RMSNorm,
    TaperNorm,
    build_norm,
    norm_info,
)
from powernorm.norms.adapted import AdaptedNorm
from powernorm.norms.feature_dims import LAST
from powernorm.surgery.changes import HOOKS
from powernorm.surgery.optimizers import fits

_STATISTICS: Final = ("running_mean", "running_var", "running_second_moment")
_COUNTERS: Final = ("num_batches_tracked", "num_nonfinite_batches")
_STATE_HOOKS: Final = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Tables of hooks that were made for the old norm's own tensors."""
_SAME: Final = {"layer": "ln", "rms": "rms"}
"""Short names of the norms with the computation of other libraries' norms, by kind."""
_OWN: Final = {LayerNorm: "ln", RMSNorm: "rms"}
"""The same for our own norms with that computation."""


def successor(found: FoundNorm, to: str, options: Mapping[str, Any], fallback: Tensor) -> Norm:
    """Return the new norm with the old one's state, not yet in its place.

    Args:
        found: the old norm, with a reading of it, or of the norm next to a gate.
        to: short name of the new norm.
        options: options of the new norm; they override those of the old one.
        fallback: its device and dtype are used if the old norm has no parameters.

    Raises:
        InputError: the new norm cannot be built.
    """
    reading = cast(Reading, found.to_swap)
    like = next(
        (tensor for tensor in (reading.weight, reading.bias) if tensor is not None), fallback
    )
    given = {"device": _device_of(reading.statistics, like), "dtype": like.dtype, **options}
    if reading.feature_dim != LAST:
        given.setdefault("feature_dim", reading.feature_dim)
    new = build_norm(to, reading.num_features, **given)
    carried = _carried(new, to, reading, found.inner[1])
    if carried.keys() - given.keys():
        new = build_norm(to, reading.num_features, **{**carried, **given})
    for name, value, old in (
        ("weight", reading.scale(), reading.weight),
        ("bias", reading.bias, reading.bias),
    ):
        _take_over(new.affine_part, name, value, old)
        if isinstance(new, ProgressiveRepBatchNorm) and _token_kind(reading):
            # The branch that fades out has separate parameters.
            _take_over(new, f"branch_{name}", value, old, shares=False)
    if type(found.module) is type(new):
        _take_over_others(new, found.module)
    beta = new.affine_part._parameters.get("bias")
    if beta is not None and reading.bias is None and reading.weight is not None:
        beta.requires_grad_(reading.weight.requires_grad)
    if _keeps_statistics(new, reading.statistics):
        _take_over_statistics(new, cast(nn.Module, reading.statistics))
        if "start" in inspect.signature(norm_info(to).layer).parameters and "start" not in options:
            # An average would begin by dropping the existing statistics.
            same = type(reading.statistics) is type(new)
            cast(Any, new).start = cast(Any, reading.statistics).start if same else "torch"
    new.train(mode_of(found.module))
    # A BatchNorm of torch with statistics that it does not track was frozen, as by Lightning's
    # BaseFinetuning.
    frozen = getattr(found.module, "is_frozen", False) or not getattr(
        reading.statistics, "track_running_stats", True
    )
    if frozen and _keeps_statistics(new, reading.statistics):
        cast(BatchStatisticsNorm, new).freeze_statistics()
    return new


def _carried(new: Norm, to: str, reading: Reading, module: nn.Module) -> dict[str, Any]:
    """Return the old norm's options that its successor keeps."""
    old = reading.statistics
    same = _SAME.get(reading.kind) == to
    if reading.kind == "own":
        same = _class_of(old) is _class_of(new)
    # Users' classes may not have these arguments.
    taken = inspect.signature(norm_info(to).layer).parameters
    kind = _token_kind(reading)
    if isinstance(new, ProgressiveRepBatchNorm | TaperNorm) and kind:
        # The initial branch is the old norm.
        eps = "eps" if isinstance(new, TaperNorm) else "branch_eps"
        begins = {"kind": kind, eps: reading.eps}
        return {name: value for name, value in begins.items() if value}
    carried: dict[str, Any] = {}
    if not any(True for _ in module.parameters()):
        carried["affine"] = False
    if reading.kind == "batch" and old is None:
        # Without running statistics it is still a BatchNorm, with the same settings.
        old, same = module, _kept_names(new) == ["running_mean", "running_var"]
    if not (same or _have_the_same(new, old)):
        return {name: value for name, value in carried.items() if name in taken}
    if reading.weight is not None and reading.bias is None:
        carried["bias"] = False
    if reading.eps is not None and reading.eps > 0:
        carried["eps"] = reading.eps
    if hasattr(old, "momentum"):
        carried["momentum"] = cast(Any, old).momentum
    groups = getattr(old, "groups", None)
    # Unless the presets of the new name exclude them.
    if groups is not None and hasattr(new, "groups") and "groups" not in norm_info(to).presets:
        carried["groups"] = groups
    return {name: value for name, value in carried.items() if name in taken}


def _token_kind(reading: Reading) -> str:
    """Return `ln` or `rms` for a norm that computes it, of other libraries or ours; else ""."""
    own = _class_of(reading.statistics)
    ours = next((name for kind, name in _OWN.items() if issubclass(own, kind)), "")
    return _SAME.get(reading.kind, ours)


def _class_of(norm: nn.Module | None) -> type:
    return type(norm.layer if isinstance(norm, AdaptedNorm) else norm)


def _device_of(statistics: nn.Module | None, like: Tensor) -> torch.device:
    """Return the device of a norm: of its statistics, if it has no parameters, else of `like`."""
    held = () if statistics is None else (*statistics.parameters(), *statistics.buffers())
    return next((tensor.device for tensor in held), like.device)


def _kept_names(new: Norm) -> list[str]:
    is_ours = isinstance(new, BatchStatisticsNorm)
    return [name for name in _STATISTICS if is_ours and _has(new, name)]


def _has(module: nn.Module, name: str) -> bool:
    return module._buffers.get(name) is not None


def _have_the_same(new: Norm, old: nn.Module | None) -> bool:
    """Return whether the old norm has the running statistics that the new one evaluates by."""
    names = _kept_names(new)
    return old is not None and bool(names) and all(_has(old, name) for name in names)


def _keeps_statistics(new: Norm, old: nn.Module | None) -> bool:
    """Return whether both keep the same running statistics of the same quantity."""
    same_input = getattr(old, "groups", None) == getattr(new, "groups", None)
    return same_input and _have_the_same(new, old)


def _take_over(
    part: nn.Module,
    name: str,
    value: Tensor | None,
    old: nn.Parameter | None,
    *,
    shares: bool = True,
) -> None:
    """Give γ or β to a norm that has it: the same parameter object if no conversion is needed."""
    own = part._parameters.get(name)
    if own is None or value is None or old is None:
        return
    if shares and value is old and fits(old, own):
        part._parameters[name] = old
        return
    with torch.no_grad():
        own.copy_(value.reshape(own.shape))
    own.requires_grad_(old.requires_grad)


@torch.no_grad()
def _take_over_others(new: Norm, old: nn.Module) -> None:
    """Copy parameters besides γ and β, such as η, to a norm of the same class."""
    for name, own in new._parameters.items():
        value = old._parameters.get(name)
        fits = own is not None and value is not None and own.shape == value.shape
        if name not in ("weight", "bias") and fits:
            cast(Tensor, own).copy_(cast(Tensor, value))


@torch.no_grad()
def _take_over_statistics(new: Norm, old: nn.Module) -> None:
    shapes = [{name: b.shape for name, b in norm.named_buffers()} for norm in (new, old)]
    alike = type(old) is type(new) and shapes[0] == shapes[1]
    for name in shapes[0] if alike else [*_kept_names(new), *_COUNTERS]:
        if _has(new, name) and _has(old, name):
            cast(Tensor, new._buffers[name]).copy_(cast(Tensor, old._buffers[name]))
    if not alike and hasattr(new, "warmup_steps"):
        # It has statistics, but has not started its own warm-up.
        cast(Tensor, new._buffers["num_batches_tracked"]).clamp_(max=1)


def same_parameters(found: FoundNorm, new: Norm) -> list[tuple[Tensor | None, Tensor | None]]:
    """Return pairs of an old norm's parameters and those of its successor with the same meaning.

    γ = 1 + weight and a weight that is γ have the same gradient.
    """
    reading, part = cast(Reading, found.to_swap), new.affine_part._parameters
    pairs: list[tuple[Tensor | None, Tensor | None]]
    pairs = [(reading.weight, part.get("weight")), (reading.bias, part.get("bias"))]
    if type(found.module) is type(new):
        others = dict(new.named_parameters())
        pairs += [(old, others.get(name)) for name, old in found.module.named_parameters()]
    return pairs


def remarks(found: FoundNorm, new: Norm) -> list[str]:
    """Return remarks on state that a successor does not take over, or changes."""
    norm, said = found.inner[1], []
    if isinstance(norm, nn.modules.batchnorm._BatchNorm) and _kept_names(new):
        if norm.running_mean is None:
            said.append("evaluates by batch statistics; the new norm has none yet: calibrate")
        elif not norm.track_running_stats and _have_the_same(new, norm):
            said.append("does not track its statistics: the new norm is frozen")
    staying = _num_hooks(found.module, HOOKS)
    inside = 0 if norm is found.module else _num_hooks(norm, HOOKS)
    lost = inside + sum(_num_hooks(one, _STATE_HOOKS) for one in {found.module, norm})
    if staying:
        said.append(f"{staying} hook{'s stay' if staying > 1 else ' stays'}")
    if lost:
        said.append(f"{lost} hook{'s' if lost > 1 else ''} of state dicts or parts will be lost")
    return said


def _num_hooks(module: nn.Module, tables: Iterable[str]) -> int:
    hooks = [hook for name in tables for hook in module.__dict__[name].values()]
    owners = [type(getattr(hook, "__self__", None)).__module__ for hook in hooks]
    return sum(not owner.startswith("powernorm.") for owner in owners)


def a_tensor(model: nn.Module) -> Tensor:
    """Return some floating-point tensor of the model, for norms that have none."""
    tensors = (*model.parameters(), *model.buffers())
    return next(
        (tensor for tensor in tensors if tensor.is_floating_point()),
        torch.empty(0, dtype=torch.float32, device="cpu"),
    )


def mode_of(norm: nn.Module) -> bool:
    """Return whether a norm trains; for a frozen norm, the mode that its model was last set to."""
    if isinstance(norm, BatchStatisticsNorm) and norm.is_frozen:
        return norm._mode
    return norm.training


def kind_of(norm: nn.Module, model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of a norm's parameters, or else of the model around it.

    Running statistics do not count: they stay float32 when a model becomes bfloat16.
    """
    own = [parameter for parameter in norm.parameters() if parameter.is_floating_point()]
    tensor: Tensor = own[0] if own else a_tensor(model)
    return tensor.device, tensor.dtype


def follow(
    old: nn.Module,
    before: tuple[torch.device, torch.dtype],
    now: tuple[torch.device, torch.dtype],
) -> None:
    """Move an old norm like the model was moved since the swap."""
    if before == now or all(
        (tensor.device, tensor.dtype) == now for tensor in (*old.parameters(), *old.buffers())
    ):
        return
    if a_tensor(old).is_meta:
        raise InputError(
            "the old norms were left on the meta device when the model got its values: rebuild the "
            "model instead of undoing the swap"
        )
    old.to(*now)
