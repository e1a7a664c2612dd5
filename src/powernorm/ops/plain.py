"""Whether a call may go straight to the kernels, past torch's dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_PLAIN_TYPES = (Tensor, nn.Parameter)


def is_plain(x: Tensor) -> bool:
    """Is this an ordinary tensor in eager mode, with nothing that records or replaces ops?

    The dispatcher costs about as much as a small norm itself. Compilers, export, tracers, dispatch
    modes and tensor subclasses need it, and get it.
    """
    return (
        type(x) in _PLAIN_TYPES
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )
