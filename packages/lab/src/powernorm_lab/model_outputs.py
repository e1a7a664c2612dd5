"""Tensors in the outputs of any model."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from powernorm.inspection.examples import tensors_in


def answer_in(outputs: Any) -> Tensor | None:
    """Return logits or last hidden states, else the first floating-point tensor, else None."""
    for name in ("logits", "last_hidden_state"):
        value = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(value, Tensor):
            return value
    return next(floats_in(outputs), None)


def floats_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of an output."""
    return (tensor for tensor in tensors_in(outputs) if tensor.is_floating_point())
