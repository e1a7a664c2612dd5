"""The padding mask of a call: checked, or handed over from a scope around a foreign model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.feature_dims import LAST, features_back, shape_without

# Thread-local and not a ContextVar: `ContextVar.get` does not trace under fullgraph compilation.
# `frames` is a tuple, the innermost last: what cannot be changed in place traces as well, and is
# restored by putting the former value back.
_scope = threading.local()


_MODULE_CALLS: Final = ("inner", "_call_impl")
"""Functions of `torch.nn.Module` that call hooks and stay on the stack during the forward."""


class MaskSource(Protocol):
    """What opened a scope for a model around the norms; words for a mask that does not fit."""

    @property
    def label(self) -> str:
        """The argument that the mask was given by."""

    def name_of(self, norm: object) -> str:
        """How to call one of the norms."""


class ScopedMask(NamedTuple):
    """A mask that a scope offers to the norms inside."""

    mask: Tensor
    source: MaskSource | None = None
    """The model's own mask, which may not be meant for each norm below; None is a user's, which
    is."""
    batch_dim: int = 0
    """Which dimension of the mask counts the sequences."""


class _Frame(NamedTuple):
    """An open scope."""

    masks: tuple[ScopedMask, ...]
    """The nearest first: of a model's own masks the first one that fits an input is used."""
    opener: object | None
    """None is a user."""
    call: FrameType | None = None
    """The running function that an opener's scope belongs to. An interrupt (no Exception) runs no
    hook that would close the scope: it is open for as long as that function is on the stack."""
    observed: bool = False
    """Whether it is for onlookers only: the norms go by the scopes around it."""


def _open_frames() -> tuple[_Frame, ...]:
    frames: tuple[_Frame, ...] = getattr(_scope, "frames", ())
    return frames


def _frames() -> tuple[_Frame, ...]:
    frames = _open_frames()
    # What is below the innermost one was looked through when that was opened.
    if not frames or torch.compiler.is_compiling() or _is_open(frames[-1]):
        return frames
    return _without_leftovers(frames)


def _without_leftovers(frames: tuple[_Frame, ...]) -> tuple[_Frame, ...]:
    kept = tuple(frame for frame in frames if _is_open(frame))
    if len(kept) < len(frames):
        _scope.frames = kept
    return kept


def _is_open(frame: _Frame) -> bool:
    if frame.call is None:
        return True
    running: FrameType | None = sys._getframe()
    while running is not None and running is not frame.call:
        running = running.f_back
    return running is not None


@contextmanager
def padding_mask(mask: Tensor | None) -> Iterator[None]:
    """Give every norm called inside the scope this padding mask.

    For models whose layers call their norms as `norm(x)`. An explicit `padding_mask=` argument of
    a norm wins over the scope. Scopes nest; None hides an outer one. Each thread has its own.

    Args:
        mask: bool, shape (batch, length) or whatever the shape of x without the features is at
            the norms, True = padding; None for no mask.

    >>> import torch, powernorm
    >>> norm = powernorm.BatchNorm(4)
    >>> with powernorm.padding_mask(torch.tensor([[False, False, True]])):
    ...     y = norm(torch.randn(1, 3, 4))
    """
    previous = _frames()
    _scope.frames = (*previous, _Frame(() if mask is None else (ScopedMask(mask),), None))
    try:
        yield
    finally:
        _scope.frames = previous


def _innermost(*, observing: bool = False) -> _Frame | None:
    """The scope that counts: for the norms themselves the innermost that is not for onlookers."""
    for frame in reversed(_frames()):
        if observing or not frame.observed:
            return frame
    return None


def current_padding_mask(
    x: Tensor | None = None, norm: object = None, *, observing: bool = False, strict: bool = True
) -> Tensor | None:
    """The mask of the innermost `padding_mask` scope of this thread, or None.

    Args:
        x: input of a norm, features last, (..., C). In a model's own scope, as `powernorm.swap`
            opens it, the mask is then the one that fits, in the shape of the input's tokens.
        norm: whose input it is, for the error.
        observing: an onlooker asks, who also sees scopes that the norms do not.
        strict: whether a model's own masks have to fit the input; else there is none where they do
            not, as in evaluation with a cache, where masks are longer than the input.

    Raises:
        InputError: none of the model's own masks fits the input, and one has to.
    """
    frame = _innermost(observing=observing)
    masks = frame.masks if frame is not None else ()
    if not masks:
        return None
    if x is None:
        return masks[0].mask
    mask, fits = _fitting(masks, x.shape[:-1])
    if not fits and strict:
        raise _misfit(masks[0], x, norm)
    return mask


def users_padding_mask() -> Tensor | None:
    """The mask of the innermost scope if a user opened it, else None."""
    frame = _innermost()
    masks = frame.masks if frame is not None else ()
    return masks[0].mask if masks and masks[0].source is None else None


def offered_padding_mask(x: Tensor, *, observing: bool) -> tuple[Tensor | None, bool]:
    """Return the mask that the scopes offer for an input, for onlookers and without an error.

    Args:
        x: input of a norm, features last, (..., C).
        observing: see `current_padding_mask`.

    Returns:
        (mask, whether it fits): (None, True) where there is none.
    """
    frame = _innermost(observing=observing)
    masks = frame.masks if frame is not None else ()
    mask, fits = _fitting(masks, x.shape[:-1]) if masks else (None, True)
    # A user's mask is for all norms inside, but not all of them need to see tokens.
    return mask, fits and (mask is None or mask.shape == x.shape[:-1])


def _fitting(masks: tuple[ScopedMask, ...], shape: torch.Size) -> tuple[Tensor | None, bool]:
    """Find the mask for an input's tokens, and say whether one fits."""
    for mask, source, batch_dim in masks:
        if source is None or mask.shape == shape:
            return mask, True
        if len(shape) == 1 and mask.ndim == 2:
            if mask.numel() == shape[0]:
                return mask.reshape(-1), True
            if mask.shape[batch_dim] == shape[0]:
                return None, True  # one vector a sequence: what was padded has been pooled away
    return None, False


def _misfit(offered: ScopedMask, x: Tensor, norm: object) -> InputError:
    assert offered.source is not None
    shape = tuple(features_back(x, getattr(norm, "feature_dim", LAST)).shape)
    return InputError(
        f"{offered.source.name_of(norm)} got an input of shape {shape}, to which the mask from "
        f"{offered.source.label}, of shape {tuple(offered.mask.shape)}, does not fit: leave this "
        "norm out of the swap by `where=`, or hand the norms masks of their inputs by their "
        "argument padding_mask or by `with powernorm.padding_mask(mask):` inside the model"
    )


def innermost_scope(
    *, observing: bool = False
) -> tuple[tuple[ScopedMask, ...], object | None] | None:
    """Masks and opener of the innermost scope (None is a user); None where none is open."""
    frame = _innermost(observing=observing)
    return None if frame is None else (frame.masks, frame.opener)


def open_scope(masks: tuple[ScopedMask, ...], opener: object, *, observed: bool = False) -> None:
    """Open a scope that outlives the caller; for hooks, where a `with` cannot span the call.

    Args:
        masks: that the norms inside may use, the nearest first.
        opener: who opens it, not None; `close_scope` takes the same object. The scope ends at the
            latest with the call of the module whose hook it is opened by.
        observed: the norms inside shall not see it, only who asks with `observing`.
    """
    if torch.compiler.is_compiling():
        _scope.frames = (*_open_frames(), _Frame(masks, opener, None, observed))
        return
    call = sys._getframe(2)
    known = call.f_code.co_name in _MODULE_CALLS
    frame = _Frame(masks, opener, call if known else None, observed)
    _scope.frames = (*_without_leftovers(_open_frames()), frame)


def close_scope(opener: object) -> None:
    """Close the opener's innermost scope and what is left open inside it; none open is no error."""
    frames = _open_frames()
    for index in range(len(frames) - 1, -1, -1):
        if frames[index].opener is opener:
            _scope.frames = frames[:index]
            return


def check_padding_mask(mask: Tensor, x: Tensor, feature_dim: int = LAST) -> None:
    """Raise unless the mask is one bool a token.

    Args:
        mask: to be checked.
        x: what it belongs to.
        feature_dim: the dimension of x that holds the features.

    Raises:
        InputError: wrong type or shape.
    """
    if mask.dtype != torch.bool:
        fix = (
            "a float mask is usually added to attention scores, with -inf or a large negative "
            "number at padding: pass `mask < 0`, or `attention_mask == 0` if it holds 1 = keep"
            if mask.is_floating_point()
            else "an integer mask usually means 1 = keep (Hugging Face's attention_mask): pass "
            "`attention_mask == 0`"
        )
        raise InputError(
            f"padding_mask has dtype {mask.dtype}, expected torch.bool with True = padding; {fix}"
        )
    expected = x.shape[:-1] if feature_dim == LAST else shape_without(x.shape, feature_dim)
    if mask.shape != expected:
        what = "token" if feature_dim == LAST else "position"
        raise InputError(
            f"padding_mask has shape {tuple(mask.shape)}, expected {tuple(expected)}: one value "
            f"for each {what} of an input of shape {tuple(x.shape)}"
        )
