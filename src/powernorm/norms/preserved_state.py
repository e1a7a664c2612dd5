"""Running a model without changing its state."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from powernorm.norms.base import Norm


def made_like(model: nn.Module) -> torch.inference_mode:
    """Return a context in which new tensors can be used with the model's, wherever it is entered.

    It is outside of `torch.inference_mode`, whose tensors cannot be trained. For a model that was
    built in inference mode it is inside, because its tensors can be written only there.
    """
    return torch.inference_mode(any(one.is_inference() for one in model.parameters()))


@contextmanager
def by_itself(model: nn.Module) -> Iterator[None]:
    """Disable inference mode and autocast, whose casts would be taken for the model's own."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    with ExitStack() as stack:
        stack.enter_context(made_like(model))
        for kind in filter(torch.amp.is_autocast_available, kinds):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def preserved_state(model: nn.Module, training: Iterable[nn.Module]) -> Iterator[None]:
    """Put only the modules of `training` in training mode in the block, with gradients off.

    Afterwards, also after an exception, every buffer, every mode, the pending penalties and the
    random number generators of torch (CPU and the model's CUDA devices) are restored. Compiled
    parts run uncompiled, so that hooks work, and torch's fused Transformer path, which never calls
    a swapped norm, is off. Parameters are not restored: nothing here changes them.
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
            _uncompiled(),
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


def _uncompiled() -> AbstractContextManager[object]:
    """Let compiled parts run uncompiled.

    There are none before something imports the compiler, which takes a second.
    """
    is_imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_imported else nullcontext()


def _restore(module: nn.Module, name: str, before: torch.Tensor) -> None:
    now = module._buffers[name]
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        module._buffers[name] = before
    else:
        # In place: an optimizer or a data-parallel wrapper may hold this tensor object.
        with torch.inference_mode(now.is_inference()):
            now.copy_(before)
