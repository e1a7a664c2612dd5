"""The padding mask of a call: checked, or taken from a scope around a model."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms.feature_dims import LAST, features_back, shape_without
from powernorm.ops.graphs import is_traced, same_sizes, shape_of

_MODULE_CALLS: Final = ("inner", "_call_impl")
"""Functions of `torch.nn.Module` that call hooks and stay on the stack during the forward."""


class MaskSource(Protocol):
    """The opener of a scope for a model around the norms."""

    is_exact: bool
    """Whether the mask belongs to each input of its shape; else `fit` is always asked."""

    @property
    def label(self) -> str:
        """Argument by which the mask was given."""

    def fit(
        self, mask: Tensor, batch_dim: int, shape: torch.Size, norm: object, strict: bool
    ) -> Tensor | None:
        """Return the mask for an input of that shape (without the features), or None."""

    def warn_unmasked(self, norm: object) -> None:
        """Warn that a norm gets no mask although the model around it was given one.

        Raises:
            InputError: the mask holds padding, but it is unknown whether True or False marks it.
        """

    def name_of(self, norm: object) -> str:
        """Return a description of one of the norms."""


class ScopedMask(NamedTuple):
    """A mask that a scope offers to the norms inside."""

    mask: Tensor
    source: MaskSource | None = None
    """Source of a model's own mask, which may not belong to each norm inside; None for a user's
    mask, which is for all."""
    batch_dim: int = 0
    """Dimension of the norms' inputs that counts the sequences; that of the mask is the first."""


class Scope(NamedTuple):
    """An open scope."""

    masks: tuple[ScopedMask, ...]
    """Masks, the nearest first; the first of a model's own masks that fits an input is used."""
    opener: object | None
    """Opener of the scope; None is a user."""
    call: FrameType | None = None
    """The running function that an opener's scope belongs to. An interrupt (no Exception) runs no
    hook that would close the scope: it is open for as long as that function is on the stack."""
    observed: bool = False
    """Whether the scope is for observers only: the norms use the scopes around it."""
    given: MaskSource | None = None
    """Outer model that was given a mask which does not reach the norms."""


_Scopes = tuple[Scope, ...]
"""Open scopes, the innermost last."""

# Scopes opened by eager code belong to the context: an asyncio task, or a thread without one.
_context: Final[ContextVar[Any]] = ContextVar("powernorm.padding_mask")


class _Context:
    """The scopes of the context, as compiled code can read them."""

    # A call of `ContextVar.get` does not trace under fullgraph compilation. A property whose getter
    # is a C function does, and guards read it again at each call of the compiled code. `get` takes
    # the instance as its default: no scope is the instance itself, also where one was closed.
    scopes = property(_context.get)


_read: Final = _Context()
# Compiled code is what dynamo traces. A non-strict torch.export runs this code as Python does; if
# it fails, torch runs no hook that would close a scope: `Scope.call` ends it, as in eager code.
# Scopes that compiled code opened, inside those of the context: it cannot set a ContextVar, and no
# other task runs before it has returned. An attribute of a plain thread-local traces (not that of a
# subclass with a default). `scopes` is a tuple: an immutable value traces as well, and is restored
# by setting the former value.
_compiled = threading.local()
# If the main thread had none, the first compiled call would set it and be recompiled for that.
_compiled.scopes = ()


def _scopes() -> tuple[_Scopes, _Scopes]:
    """Return the scopes of the context and those of compiled code inside them."""
    scopes = _read.scopes
    return () if scopes is _read else scopes, getattr(_compiled, "scopes", ())


def _set_scopes(context: _Scopes, compiled: _Scopes) -> None:
    if not torch.compiler.is_dynamo_compiling():
        _context.set(context or _read)
    _compiled.scopes = compiled


def _drop_leftovers() -> tuple[_Scopes, _Scopes]:
    context, compiled = _scopes()
    if not torch.compiler.is_dynamo_compiling() and (context or compiled):
        context, compiled = (tuple(filter(_is_open, one)) for one in (context, compiled))
        _set_scopes(context, compiled)
    return context, compiled


def _push(scope: Scope) -> None:
    context, compiled = _drop_leftovers()
    # Between two graphs of a compiled call eager code opens scopes inside those of the call.
    if compiled or torch.compiler.is_dynamo_compiling():
        _compiled.scopes = (*compiled, scope)
    else:
        _set_scopes((*context, scope), ())


def _close(scope: Scope, opened: _Scopes) -> None:
    """Close a user's scope, if it is open, and scopes that were left open inside it.

    Args:
        scope: the scope.
        opened: scopes of compiled code when it was opened.
    """
    if torch.compiler.is_dynamo_compiling():
        _compiled.scopes = opened
        return
    context, compiled = _scopes()
    scopes = compiled if any(one is scope for one in compiled) else context
    index = next((index for index, one in enumerate(scopes) if one is scope), None)
    if index is None:
        return
    # Users' scopes inside it stay open: two generators may close theirs in another order.
    kept = (*scopes[:index], *(one for one in scopes[index + 1 :] if one.opener is None))
    _set_scopes(*((context, kept) if scopes is compiled else (kept, ())))


def _is_open(scope: Scope) -> bool:
    if scope.call is None:
        return True
    running: FrameType | None = sys._getframe()
    while running is not None and running is not scope.call:
        running = running.f_back
    return running is not None


def padding_after(lengths: Tensor, length: int) -> Tensor:
    """Return the mask (batch, length) of rows with that many valid positions at their start."""
    return torch.arange(length, device=lengths.device) >= lengths.unsqueeze(1)


def _check_is_mask(mask: object) -> None:
    """Raise an InputError unless a padding mask is a tensor, or None.

    Raises:
        InputError: says how to convert it.
    """
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError(
            f"padding_mask is a {type(mask).__name__}, expected a tensor: convert with "
            "torch.as_tensor(mask)"
        )


@contextmanager
def padding_mask(mask: Tensor | None) -> Iterator[None]:
    """Give every norm called inside the scope this padding mask.

    For models whose layers call their norms as `norm(x)`. An explicit `padding_mask=` argument of
    a norm takes precedence over the scope. Scopes nest; None hides an outer one. Each thread and
    each asyncio task has its own scopes; a task, and `asyncio.to_thread`, begin with those that
    were open where they were created.

    Args:
        mask: bool, True = padding, of shape (batch, length) or whatever shape x has at the norms
            without the features; None for no mask.

    >>> import torch, powernorm
    >>> norm = powernorm.BatchNorm(4)
    >>> with powernorm.padding_mask(torch.tensor([[False, False, True]])):
    ...     y = norm(torch.randn(1, 3, 4))
    """
    _check_is_mask(mask)
    _, opened = _scopes()
    scope = Scope(() if mask is None else (ScopedMask(mask),), None)
    try:
        _push(scope)
        yield
        _close(scope, opened)
    except BaseException:  # an interrupt too, which may come while the scope opens or closes
        _close(scope, opened)
        raise


def innermost_scope(*, observing: bool = False) -> Scope | None:
    """Return the scope that applies: for the norms, the innermost that is not for observers."""
    context, compiled = _scopes()
    # The scopes below the innermost one were checked when that one was opened.
    innermost = (compiled or context)[-1:]
    if innermost and not torch.compiler.is_dynamo_compiling() and not _is_open(innermost[0]):
        context, compiled = _drop_leftovers()
    for scope in reversed((*context, *compiled)):
        if observing or not scope.observed:
            return scope
    return None


def current_padding_mask(
    x: Tensor | None = None, norm: object = None, *, observing: bool = False, strict: bool = True
) -> Tensor | None:
    """Return the mask of the innermost `padding_mask` scope that is open here, or None.

    Args:
        x: input of a norm, features last, (..., C). In a model's own scope, as `powernorm.swap`
            opens it, the mask is then the one that fits, in the shape of the input's tokens.
        norm: the norm that gets the input, for the error.
        observing: whether an observer asks, which also sees scopes that the norms do not.
        strict: whether a model's own masks have to fit the input; else None is returned if they do
            not, as in evaluation with a cache, where masks are longer than the input.

    Raises:
        InputError: none of the model's own masks fits the input, and `strict` is set.
    """
    if _read.scopes is _read and not getattr(_compiled, "scopes", ()):
        return None  # no scope is open, the usual case
    scope = innermost_scope(observing=observing)
    if scope is None or not scope.masks:
        given = scope.given if scope is not None and strict else None
        # With one vector per sequence there is no padding.
        if given is not None and x is not None and x.ndim > 2:
            given.warn_unmasked(norm)
        return None
    if x is None:
        return scope.masks[0].mask
    mask, fits = _fitting(scope.masks, shape_of(x)[:-1], norm, strict)
    if not fits and strict:
        raise _misfit(scope.masks[0], x, norm)
    return mask


def users_padding_mask() -> Tensor | None:
    """Return the mask of the innermost scope if a user opened it, else None."""
    scope = innermost_scope()
    masks = scope.masks if scope is not None else ()
    return masks[0].mask if masks and masks[0].source is None else None


def offered_padding_mask(x: Tensor, norm: object, *, observing: bool) -> tuple[Tensor | None, bool]:
    """Return the mask that the scopes offer for an input, for observers and without an error.

    Args:
        x: input of a norm, features last, (..., C).
        norm: the norm that gets the input.
        observing: see `current_padding_mask`.

    Returns:
        (mask, whether it fits): (None, True) if there is none.
    """
    scope = innermost_scope(observing=observing)
    if scope is None or not scope.masks:
        return None, True
    mask, fits = _fitting(scope.masks, shape_of(x)[:-1], norm, False)
    # A user's mask is for all norms inside, but some inputs may not be tokens.
    return mask, fits and (mask is None or same_sizes(mask.shape, x.shape[:-1]) is True)


def _fitting(
    masks: tuple[ScopedMask, ...], shape: torch.Size, norm: object, strict: bool
) -> tuple[Tensor | None, bool]:
    """Return the mask for an input's tokens, and whether one fits."""
    for mask, source, batch_dim in masks:
        turned = mask.transpose(0, 1) if batch_dim else mask
        sizes = shape_of(turned)
        if source is None or (source.is_exact and same_sizes(sizes, shape)):
            return turned, True
        if len(shape) == 1 and mask.ndim == 2:
            if same_sizes((sizes[0] * sizes[1],), shape):
                return turned.reshape(-1), True
            if same_sizes((sizes[batch_dim],), shape):
                return None, True  # one vector per sequence: padding has been pooled away
            if not is_traced() and int((~mask).sum()) == shape[0]:
                return None, True  # the model has removed padding itself
        fitted = source.fit(mask, batch_dim, shape, norm, strict)
        if fitted is not None:
            return fitted, True
    return None, any(_is_pooled(shape, one) for one in masks)


def _is_pooled(shape: torch.Size, offered: ScopedMask) -> bool:
    """Return whether an input has one position a sequence, so that padding is pooled away."""
    sequences = shape_of(offered.mask)[:1]
    pooled = (1, *sequences) if offered.batch_dim else (*sequences, 1)
    return offered.mask.ndim == 2 and same_sizes(shape, pooled) is True


def _misfit(offered: ScopedMask, x: Tensor, norm: object) -> InputError:
    assert offered.source is not None
    shape = tuple(features_back(x, getattr(norm, "feature_dim", LAST)).shape)
    nearer = (
        "if a module around it takes a mask that fits, name that with powernorm.declare_mask "
        "before the swap; else "
    )
    return InputError(
        f"{offered.source.name_of(norm)} got an input of shape {shape}, to which the mask from "
        f"{offered.source.label}, of shape {tuple(offered.mask.shape)}, does not fit: "
        f"{nearer if getattr(offered.source, 'is_own', False) else ''}leave this "
        "norm out of the swap by `where=`, or hand the norms masks of their inputs by their "
        "argument padding_mask or by `with powernorm.padding_mask(mask):` inside the model"
    )


def open_scope(
    masks: tuple[ScopedMask, ...],
    opener: object,
    *,
    observed: bool = False,
    given: MaskSource | None = None,
) -> None:
    """Open a scope that outlives the caller; for hooks, where a `with` cannot span the call.

    Args:
        masks: masks that the norms inside may use, the nearest first.
        opener: object that opens it, not None; `close_scope` takes the same object. The scope ends
            latest with the call of the module whose hook opens it.
        observed: whether only callers with `observing` see it, not the norms inside.
        given: the outer model that was given a mask, if none reaches the norms inside.
    """
    call = None if torch.compiler.is_dynamo_compiling() else sys._getframe(2)
    if call is not None and call.f_code.co_name not in _MODULE_CALLS:
        call = None
    _push(Scope(masks, opener, call, observed, given))


def close_scope(opener: object) -> None:
    """Close the opener's innermost scope and those left open inside it, if any is open."""
    context, compiled = _scopes()
    for index in range(len(context) + len(compiled) - 1, -1, -1):
        if (*context, *compiled)[index].opener is not opener:
            continue
        if index >= len(context):
            _compiled.scopes = compiled[: index - len(context)]
        elif not torch.compiler.is_dynamo_compiling():
            # In compiled code `Scope.call` ends the scopes that eager code has opened.
            _set_scopes(context[:index], ())
        return


_looks = {"left": 20}


def _look_for_all(mask: Tensor | None) -> None:
    """Warn once if a user's mask is True everywhere; only the first masks are checked."""
    if mask is None or is_traced() or mask.is_meta or not _looks["left"] or mask.numel() < 2:
        return
    _looks["left"] -= 1
    if mask.dtype == torch.bool and bool(mask.all()):
        _looks["left"] = 0
        warnings.warn(
            f"padding_mask of shape {tuple(mask.shape)} is True everywhere: all is padding, and no "
            "statistics change. True means padding; pass `~mask` if it marks valid positions",
            stacklevel=3,
        )


def check_padding_mask(mask: Tensor, x: Tensor, feature_dim: int = LAST) -> None:
    """Raise an InputError unless the mask holds one bool per token.

    Args:
        mask: the mask to check.
        x: the input that it belongs to.
        feature_dim: the dimension of x that holds the features.

    Raises:
        InputError: wrong type, shape or device.
    """
    _check_is_mask(mask)
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
    shape = shape_of(x)
    expected = shape[:-1] if feature_dim == LAST else shape_without(shape, feature_dim)
    if same_sizes(shape_of(mask), expected) is False:
        what = "token" if feature_dim == LAST else "position"
        raise InputError(
            f"padding_mask has shape {tuple(mask.shape)}, expected {tuple(expected)}: one value "
            f"for each {what} of an input of shape {tuple(x.shape)}"
        )
    if mask.device != x.device:
        raise InputError(
            f"padding_mask is on {mask.device}, the input is on {x.device}: pass "
            "`padding_mask.to(x.device)`"
        )
    _look_for_all(mask)
