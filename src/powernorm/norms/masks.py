"""The padding mask of a call: checked, or handed over from a scope around a foreign model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from powernorm.errors import InputError

# Thread-local and not a ContextVar: `ContextVar.get` does not trace under fullgraph compilation.
_scope = threading.local()


@contextmanager
def padding_mask(mask: Tensor | None) -> Iterator[None]:
    """Give every norm called inside the scope this padding mask.

    For models whose layers call their norms as `norm(x)`. An explicit `padding_mask=` argument of
    a norm wins over the scope. Scopes nest; None hides an outer one. Each thread has its own.

    Args:
        mask: bool, shape (batch, length) or whatever `x.shape[:-1]` is at the norms, True =
            padding; None for no mask.

    >>> import torch, powernorm
    >>> norm = powernorm.BatchNorm(4)
    >>> with powernorm.padding_mask(torch.tensor([[False, False, True]])):
    ...     y = norm(torch.randn(1, 3, 4))
    """
    previous = current_padding_mask()
    _scope.mask = mask
    try:
        yield
    finally:
        _scope.mask = previous


def current_padding_mask() -> Tensor | None:
    """The mask of the innermost `padding_mask` scope of this thread, or None."""
    mask: Tensor | None = getattr(_scope, "mask", None)
    return mask


def check_padding_mask(mask: Tensor, x: Tensor) -> None:
    """Raise unless the mask is one bool a token.

    Raises:
        InputError: wrong type or shape.
    """
    if mask.dtype != torch.bool:
        mend = (
            "a float mask is usually added to attention scores, with -inf or a large negative "
            "number at padding: pass `mask < 0`, or `attention_mask == 0` if it holds 1 = keep"
            if mask.is_floating_point()
            else "an integer mask usually means 1 = keep (Hugging Face's attention_mask): pass "
            "`attention_mask == 0`"
        )
        raise InputError(
            f"padding_mask has dtype {mask.dtype}, expected torch.bool with True = padding; {mend}"
        )
    if mask.shape != x.shape[:-1]:
        raise InputError(
            f"padding_mask has shape {tuple(mask.shape)}, expected {tuple(x.shape[:-1])}: one "
            f"value for each token of an input of shape {tuple(x.shape)}"
        )
