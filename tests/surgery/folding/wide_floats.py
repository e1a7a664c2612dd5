"""Models that convert to float32 inside, as norms of transformers do, in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class WideFloats(TorchFunctionMode):
    """In the block a float64 tensor stays one, whatever code asks for."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        is_wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if is_wide and func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0]
        if is_wide and kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        if is_wide and func is Tensor.to:
            args = tuple(torch.float64 if _is_narrow(one) else one for one in args)
        return func(*args, **kwargs)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW
