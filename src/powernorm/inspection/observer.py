"""Observing the norms of a model: their inputs, outputs and gradients.

`observe` is for passes over data: callbacks receive each call of each norm. `NormObserver` is for
training: its operators work under `torch.compile` and see the gradients too. Both read a call's
arguments and find its padding in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.inspection.observer_ops import number_of
from powernorm.inspection.observer_ops import observe as observe_tensor
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
        x: what the norm normalizes, (..., C): features last, the residual added; of a nested
            tensor its tokens in a row, of a distributed one those of this process.
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
        norms: of this or any library, by a name; they are not changed.
        on_input: receives each call before it runs, on the norm's device.
        on_output: receives the name and what the norm returned, after each call; None if the call
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
        x, mask, residual = _arguments_of(args, kwargs)
        dim, x = module.feature_dim, x if residual is None else x + residual
    else:
        x = next(iter((*args, *kwargs.values())), None)  # type: ignore[assignment]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
    if x.is_nested:
        check_nested(name, x, dim)
        return NormCall(name, module, packed_tokens(x), None)
    x = _features_last(x, dim)
    fits = True
    if mask is None:
        mask, fits = _scoped_mask(x, module)
    x, mask, _ = _dense(x, mask, LAST)
    if mask is not None:
        check_padding_mask(mask, x)
    return NormCall(name, module, x, mask, fits)


def _dense(
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


def _scoped_mask(x: Tensor, module: nn.Module) -> tuple[Tensor | None, bool]:
    """Return the mask of the scopes around a call, and whether it fits."""
    if isinstance(module, BatchStatisticsNorm):
        # The mask that the layer itself would use in training, or its error if none fits.
        return module.mask_for(x, None), True
    # This library's other norms do not use masks, like those of other libraries.
    mask, fits = offered_padding_mask(x, module, observing=not isinstance(module, Norm))
    return (mask, True) if fits else (None, False)


def _arguments_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return input, mask and residual of a call of a norm of this library."""
    names = ("x", "padding_mask", "residual")
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def _features_last(x: Tensor, dim: int) -> Tensor:
    return features_last(x, dim) if has_dim(x, dim) else x


class NormObserver(ABC):
    """Base of observers of one norm's calls in training, with the gradients of each call.

    Unlike `observe`, which uses plain hooks, this puts the operators of `observer_ops` around each
    call, which run when compiled code runs, forward and backward. It never waits for a device.

    Args:
        module: the norm; it is not changed.
        feature_dim: the dimension of the features in its input.
    """

    def __init__(self, module: nn.Module, feature_dim: int = LAST) -> None:
        self.module = module
        self.feature_dim = feature_dim
        self._total: Tensor | None = None
        """Sum of input and residual, kept between the two hooks of a call."""
        self._number = number_of(self)

    def register_hooks(self, wanted: Callable[[], bool]) -> list[RemovableHandle]:
        """Register the hooks, which report calls in training mode while `wanted` returns True.

        Copies of the module, by `copy` or by pickling, are not observed: their hooks do nothing.
        """
        before = _Hook(self, "before", wanted)
        handles = [self.module.register_forward_pre_hook(before, with_kwargs=True)]
        if isinstance(self.module, Norm):
            handles.append(self.module.register_forward_hook(_Hook(self, "after", wanted)))
        return handles

    def before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call with the input observed; None leaves them unchanged."""
        self._total = None  # left over if a call raised between the hooks
        module = self.module
        if not isinstance(module, Norm):
            return self._before_foreign(args, kwargs)
        x, mask, residual = _arguments_of(args, kwargs)
        module.check_input(x, None if x.is_nested or is_sharded(x) else mask, residual)
        if residual is not None:
            # Added here, so that the observed gradient is the norm's alone, not the stream's too.
            x = self._total = x + residual
        tokens, seen, wrap = self._dense(x, mask)
        if seen is not None and isinstance(module, BatchStatisticsNorm) and module.floor:
            # Such a layer does this itself, but here it has to come before the operator saves x.
            tokens = tokens.masked_fill(seen.unsqueeze(self.feature_dim), 0.0)
        return (wrap(observe_tensor(tokens, seen, self._number)), mask), {}

    def _before_foreign(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        for name, x in (*enumerate(args[:1]), *kwargs.items()):
            if isinstance(x, Tensor) and x.is_floating_point():
                tokens, seen, wrap = self._dense(x, None)
                x = wrap(observe_tensor(tokens, seen, self._number))
                return ((x, *args[1:]), kwargs) if name == 0 else (args, {**kwargs, name: x})
        return None

    def _dense(
        self, x: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
        """Return the tokens of an input and their padding: the call's mask, or the scope's."""
        if x.is_nested:
            check_nested(type(self.module).__name__, x, self.feature_dim)
        elif mask is None:
            found, _ = _scoped_mask(_features_last(x, self.feature_dim), self.module)
            mask = found if found is None or found.dtype == torch.bool else None
        return _dense(x, mask, self.feature_dim)

    def after(self, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output of a call with its gradient observed."""
        x = args[0]
        if self.needs_output(x) and isinstance(output, Tensor) and output.requires_grad:
            y, _, wrap = _dense(output, None, self.feature_dim)
            tokens, seen, _ = self._dense(x, args[1])
            output = wrap(observe_tensor(y, seen, self._number, tokens))
        total, self._total = self._total, None
        return output if total is None else (output, total)

    def see_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Receive an input from the operator, unless checkpointing repeats the forward."""
        if not in_backward():
            self.on_input(_features_last(x, self.feature_dim), padding_mask)

    def see_gradient(self, gradient: Tensor, x: Tensor | None, masked: bool) -> None:
        """Receive the gradient of an input from the operator, or with x that of an output."""
        gradient = _features_last(gradient, self.feature_dim)
        if x is None:
            self.on_input_gradient(gradient)
        else:
            self.on_output_gradient(gradient, _features_last(x, self.feature_dim), masked)

    def needs_output(self, x: Tensor) -> bool:
        """Return whether the gradient of the output for x has to be observed."""
        del x
        return False

    @abstractmethod
    def on_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Process an input, (..., C), and its padding."""

    @abstractmethod
    def on_input_gradient(self, gradient: Tensor) -> None:
        """Process the gradient of an input, (..., C)."""

    def on_output_gradient(self, gradient: Tensor, x: Tensor, masked: bool) -> None:
        """Process the gradient of an output and the input, both (..., C).

        Called only if `needs_output` returns True. `masked` says whether the input has padding.
        """
        del gradient, x, masked


class _Hook:
    """Hook that reports the calls of a module to its observer.

    A copy of a module has copies of its hooks, which have no observer and do nothing.

    Args:
        observer: None in a copy.
        action: name of its method, `before` or `after` the module's forward.
        wanted: called at each call of the module; False skips the call.
    """

    def __init__(
        self,
        observer: NormObserver | None = None,
        action: str = "",
        wanted: Callable[[], bool] = bool,
    ) -> None:
        self._observer = observer
        self._action = action
        self._wanted = wanted

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        """Return how `copy.deepcopy` and pickle rebuild the hook: without an observer."""
        return type(self), ()

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        observer = self._observer
        if observer is None or not (self._wanted() and module.training):
            return None
        # Shallow copies share the hooks, hence the comparison. Compiled code skips it: it would
        # be a guard on each layer, so that layers could not share compiled code.
        if not torch.compiler.is_compiling() and module is not observer.module:
            return None
        return getattr(observer, self._action)(*call)
