"""Running a model without leaving a trace in it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from powernorm.norms.base import Norm


@contextmanager
def preserved_state(model: nn.Module, training: Iterable[nn.Module]) -> Iterator[None]:
    """In the block only the modules of `training` are in training mode, and gradients are off.

    Afterwards, also after an exception, every buffer, every mode, the penalties that wait to be
    asked for and the random number generators of torch (CPU and the model's CUDA devices) are what
    they were. Compiled parts run uncompiled,
    so that they see hooks, and torch's fused Transformer path, which never calls a swapped norm,
    is off. Parameters are not guarded: nothing here changes them.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = {
        (module, name): buffer.detach().clone()
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    }
    transient = {module: module.transient_state() for module in modes if isinstance(module, Norm)}
    devices = {
        tensor.device.index
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cuda"
    }
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        with (
            torch.random.fork_rng(devices=sorted(devices)),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            torch.backends.mha.set_fastpath_enabled(False)
            for module in modes:
                module.training = False
            for module in training:
                for part in module.modules():
                    part.training = True
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in modes.items():
            module.training = mode
        for norm, state in transient.items():
            norm.__dict__.update(state)
        with torch.no_grad():
            for (module, name), before in buffers.items():
                _restore(module, name, before)


def _restore(module: nn.Module, name: str, before: torch.Tensor) -> None:
    now = module._buffers[name]
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        module._buffers[name] = before
    else:
        # In place: others (an optimizer, a data-parallel wrapper) may hold the very tensor.
        now.copy_(before)
