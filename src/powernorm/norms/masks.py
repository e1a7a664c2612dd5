"""The padding mask of a call: checked, or handed over from a scope around a foreign model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from powernorm.errors import InputError

# Thread-local and not a ContextVar: `ContextVar.get` does not trace under fullgraph compilation.
# `frames` is a tuple of (mask, who opened it; None is a user), the innermost last: what cannot be
# changed in place traces as well, and is restored by putting the former value back.
_scope = threading.local()

_Frames = tuple[tuple[Tensor | None, object | None], ...]


def _frames() -> _Frames:
    frames: _Frames = getattr(_scope, "frames", ())
    return frames


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
    previous = _frames()
    _scope.frames = (*previous, (mask, None))
    try:
        yield
    finally:
        _scope.frames = previous


def current_padding_mask() -> Tensor | None:
    """The mask of the innermost `padding_mask` scope of this thread, or None."""
    frames = _frames()
    return frames[-1][0] if frames else None


def scope_opener() -> object | None:
    """Who opened the innermost scope by `open_scope`; None for a user's, or where none is open."""
    frames = _frames()
    return frames[-1][1] if frames else None


def open_scope(mask: Tensor | None, opener: object) -> None:
    """Open a scope that outlives the caller; for hooks, where a `with` cannot span the call.

    Args:
        mask: as of `padding_mask`.
        opener: who opens it, not None; `close_scope` takes the same object.
    """
    _scope.frames = (*_frames(), (mask, opener))


def close_scope(opener: object) -> None:
    """Close the opener's innermost scope and what is left open inside it; none open is no error."""
    frames = _frames()
    for index in range(len(frames) - 1, -1, -1):
        if frames[index][1] is opener:
            _scope.frames = frames[:index]
            return


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
