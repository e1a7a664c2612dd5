"""Source of NaN and infinity: the first module that produces them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from powernorm.inspection.batches import Forward, call_model
from powernorm.inspection.examples import tensors_in
from powernorm.inspection.modules import modules_by_name
from powernorm.norms.arguments import check_function, check_model
from powernorm.norms.preserved_state import preserved_state


def first_nonfinite(model: nn.Module, batch: Any, forward: Forward | None = None) -> str | None:
    """Return the name of the first module whose output is not finite although its input is.

    The model runs once, in the modes that its modules have, without gradients and uncompiled. If
    modules are nested, the innermost is named, as it finishes first. -∞ in the input of a module is
    accepted, because attention masks hold it. Weights, buffers, modes and torch's random numbers
    are unchanged afterwards. The device is synchronized at every module, so use this to examine a
    step that failed, not in every step.

    Args:
        model: any module.
        batch: arguments of the model: keyword arguments, a tuple or list, or one tensor.
        forward: runs the model on a batch; None calls it.

    Returns:
        The dotted name, `""` for the model itself. None if all outputs are finite, or if
        every output that is not finite has such an input: check the batch then.

    Raises:
        InputError: no model, or a forward that is not a function.
    """
    check_model(model)
    check_function("forward", forward)
    names = {module: name for name, module in reversed(modules_by_name(model).items())}
    modes = {module: module.training for module in model.modules()}
    found: list[str] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not found and _is_broken(output) and not _is_broken((args, kwargs), masks=True):
            found.append(names[module])

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in names]
    try:
        with preserved_state(model, ()):
            for module, mode in modes.items():
                module.training = mode
            (forward or call_model)(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _is_broken(value: Any, *, masks: bool = False) -> bool:
    """Return whether any number in a value is not finite; with `masks`, -∞ is accepted."""
    for tensor in tensors_in(value):
        if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_nested:
            bad = tensor.isnan() | tensor.isposinf() if masks else ~tensor.isfinite()
            if bool(bad.any()):
                return True
    return False
