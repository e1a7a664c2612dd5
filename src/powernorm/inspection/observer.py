"""Observing the norms of a model in passes over data: their inputs and outputs.

Monitors of training (`powernorm.diagnosis.observers`) read a call's arguments and find its padding
in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.norms import BatchStatisticsNorm, Norm
from powernorm.norms.feature_dims import LAST, features_last, has_dim
from powernorm.norms.masks import check_padding_mask, offered_padding_mask
from powernorm.norms.nested import check_nested, nested_like, packed_tokens
from powernorm.norms.sharded import is_sharded, local_mask, local_values, sharded_like
from powernorm.ops.moments import Moments
from powernorm.ops.torch_private import in_backward


@dataclass(eq=False, slots=True)
class NormCall:
    """One call of a norm.

    Attributes:
        name: name of the norm, as given to `observe`.
        module: the norm.
        x: input of the norm, (..., C): features last, the residual added; for a nested tensor its
            tokens, for a distributed one those of this process.
        padding_mask: `x.shape[:-1]` bool, True = padding; None if there is none.
        mask_fits: whether the masks of the scopes around the call, if any, fit the input; if not,
            all positions count as tokens.
    """

    name: str
    module: nn.Module
    x: Tensor
    padding_mask: Tensor | None
    mask_fits: bool = True

    def moments(self) -> Moments:
        """Return the moments of a batch norm's input over the valid tokens."""
        assert isinstance(self.module, BatchStatisticsNorm)
        return self.module.token_moments(self.x, self.padding_mask)


@contextmanager
def observe(
    norms: Mapping[str, nn.Module],
    *,
    on_input: Callable[[NormCall], None] | None = None,
    on_output: Callable[[str, Any], None] | None = None,
    feature_dims: Mapping[str, int] | None = None,
) -> Iterator[None]:
    """Pass the inputs and outputs of norms to callbacks while in the block.

    A forward that activation checkpointing repeats is not reported. Compiled models ignore
    hooks: run them uncompiled (`powernorm.norms.preserved_state`).

    Args:
        norms: norms of this or any library, by name; they are not changed.
        on_input: receives each call before it runs, on the norm's device.
        on_output: receives the name and the norm's output, after each call; None if the call
            raised.
        feature_dims: dimension of the features in the inputs of other libraries' norms, by name;
            the last by default.

    Raises:
        InputError: in the block: a nested tensor that is not jagged, a mask that is not bool, or
            one that does not fit a norm with batch statistics.
    """
    dims = feature_dims or {}

    def before(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert on_input is not None
        if not torch.compiler.is_compiling() and in_backward():
            return
        call = _call_of(name, module, dims.get(name, LAST), args, kwargs)
        if call is not None:
            on_input(call)

    def after(name: str, *call: Any) -> None:
        assert on_output is not None
        on_output(name, call[-1])

    handles: list[RemovableHandle] = []
    for name, module in norms.items():
        if on_input is not None:
            # A hook with `with_kwargs` that returns None leaves the arguments unchanged.
            hook = partial(before, name)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if on_output is not None:
            handles.append(module.register_forward_hook(partial(after, name), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call_of(
    name: str, module: nn.Module, dim: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> NormCall | None:
    """Read a call; return None if the norm's first argument is not a floating-point tensor."""
    mask: Tensor | None = None
    if isinstance(module, Norm):
        x, mask, residual = arguments_of(args, kwargs)
        dim, x = module.feature_dim, x if residual is None else x + residual
    else:
        x = next(iter((*args, *kwargs.values())), None)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
    if x.is_nested:
        check_nested(name, x, dim)
        return NormCall(name, module, packed_tokens(x), None)
    x = tokens_last(x, dim)
    fits = True
    if mask is None:
        mask, fits = scoped_mask(x, module)
    x, mask, _ = dense(x, mask, LAST)
    if mask is not None:
        check_padding_mask(mask, x)
    return NormCall(name, module, x, mask, fits)


def dense(
    x: Tensor, padding_mask: Tensor | None, dim: int
) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """Return the tokens of an input that may be nested or distributed, as an ordinary tensor.

    Returns:
        Tokens, padding, and a function that returns such tokens as a tensor of the input's type.
    """
    if x.is_nested:
        return packed_tokens(x), None, partial(nested_like, x=x)
    if is_sharded(x):
        sharded: Any = x
        mask = local_mask(padding_mask, sharded, dim)
        return local_values(sharded), mask, partial(sharded_like, x=sharded)
    return x, padding_mask, lambda tokens: tokens


def scoped_mask(x: Tensor, module: nn.Module) -> tuple[Tensor | None, bool]:
    """Return the mask of the scopes around a call, and whether it fits."""
    if isinstance(module, BatchStatisticsNorm):
        # The mask that the layer itself would use in training, or its error if none fits.
        return module.mask_for(x, None), True
    # This library's other norms do not use masks, like those of other libraries: what an observer
    # attached for them is theirs.
    mask, fits = offered_padding_mask(x, module, observing=True)
    return (mask, True) if fits else (None, False)


def arguments_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return input, mask and residual of a call of a norm of this library."""
    names = ("x", "padding_mask", "residual")
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def tokens_last(x: Tensor, dim: int) -> Tensor:
    """Return a tensor with the features last; unchanged if it lacks the dimension."""
    return features_last(x, dim) if has_dim(x, dim) else x


class ObserverHook:
    """Hook that reports the calls of a module to its observer.

    A copy of a module has copies of its hooks, which have no observer and do nothing.

    Args:
        observer: None in a copy.
        action: name of its method, `before` or `after` the module's forward.
        wanted: called at each call of the module; False skips the call.
    """

    def __init__(
        self, observer: Any = None, action: str = "", wanted: Callable[[], bool] = bool
    ) -> None:
        self._observer = observer
        self._action = action
        self._wanted = wanted

    def __reduce__(self) -> tuple[type[ObserverHook], tuple[()]]:
        """Return how `copy.deepcopy` and pickle rebuild the hook: without an observer."""
        return type(self), ()

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        """Return the observer's new arguments or output, None to change nothing."""
        observer = self._observer
        if observer is None or not (self._wanted() and module.training):
            return None
        # Shallow copies share the hooks, hence the comparison. Compiled code skips it: it would
        # be a guard on each layer, so that layers could not share compiled code.
        if not torch.compiler.is_compiling() and module is not observer.module:
            return None
        return getattr(observer, self._action)(*call)
