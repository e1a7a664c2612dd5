"""Mixed precision in training."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from powernorm_lab.settings.training import Precision

DTYPES: Final[Mapping[Precision, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes of the precisions below float32."""


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Return a context in which layers compute in a precision; the weights stay float32."""
    dtype = DTYPES.get(precision)
    if dtype is None:
        return nullcontext()
    # No cache: weights change with every update, and a penalty's graph would keep their copies.
    return torch.autocast(device.type, dtype, cache_enabled=False)
