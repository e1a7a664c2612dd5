"""What a monitor keeps of a norm's calls: sums on the device, and how its hooks get hold of them.

A watch belongs to one norm. Its hooks put the operators of `probes` around an observed call; what
these show becomes `Record`s of float64 sums. Nothing here waits for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from powernorm.diagnosis.gradient_parts import needs_products, state_of
from powernorm.diagnosis.probes import number_of, observe_input, observe_output
from powernorm.diagnosis.token_gradients import gradient_sums, input_sums, wide
from powernorm.norms import BatchStatisticsNorm, Norm
from powernorm.norms.feature_dims import LAST, features_last, has_dim
from powernorm.norms.masks import current_padding_mask, innermost_scope
from powernorm.ops.reference.batch import in_backward

NUM_SAMPLES: Final = 16

Kind = Literal["input", "input gradient", "output gradient"]


@dataclass(frozen=True, eq=False)
class Record:
    """What one call of a norm left behind, forward or backward.

    Attributes:
        layer: number of the norm in the model.
        kind: what was seen.
        sums: add up over processes, float64.
        own: the same on every process, or of no concern to others, float64.
        is_finite: whether all that was seen was finite; known on the host only.
    """

    layer: int
    kind: Kind
    sums: Tensor
    own: Tensor
    is_finite: bool = True


class NormWatch(ABC):
    """Sees the calls of one norm while it is wanted.

    Args:
        layer: number of the norm in the model.
        module: the norm; it is not changed.
        keep: gets the records in the order of events.
        feature_dim: the dimension of the features in the norm's input.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        keep: Callable[[Record], None],
        feature_dim: int = LAST,
    ) -> None:
        self.layer = layer
        self.module = module
        self.feature_dim = feature_dim
        self._keep = keep
        self._total: Tensor | None = None
        """Input and residual added, between the two hooks of a call."""
        self._number = number_of(self)

    def attach(self, wanted: Callable[[], bool]) -> list[RemovableHandle]:
        """Registers the hooks; only calls in training mode are seen, and only when wanted.

        Copies of the module, by `copy` or by pickling, are not seen: their hooks do nothing.
        """
        before = _InputHook(self, wanted)
        handles = [self.module.register_forward_pre_hook(before, with_kwargs=True)]
        if isinstance(self.module, Norm):
            handles.append(self.module.register_forward_hook(_OutputHook(self, wanted)))
        return handles

    def observe_input(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of a call, with the input shown on its way; None leaves them."""
        self._total = None  # of a call that raised between the hooks
        module = self.module
        if not isinstance(module, Norm):
            return self._observe_foreign_input(args, kwargs)
        x, mask, residual = _arguments(args, kwargs)
        module.check_input(x, mask, residual)
        if residual is not None:
            # Added here, so that the gradient seen is the norm's and not the stream's as well.
            x = self._total = x + residual
        seen = self.mask_of(x, mask)
        if seen is not None and isinstance(module, BatchStatisticsNorm) and module.floor:
            # What such a layer does itself, but before the operator that keeps x.
            x = x.masked_fill(seen.unsqueeze(self.feature_dim), 0.0)
        return (observe_input(x, seen, self._number), mask), {}

    def _observe_foreign_input(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if args and isinstance(args[0], Tensor):
            x = observe_input(args[0], self._fitting_mask(args[0]), self._number)
            return (x, *args[1:]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                x = observe_input(value, self._fitting_mask(value), self._number)
                return args, {**kwargs, name: x}
        return None

    def observe_output(self, args: tuple[Any, ...], output: Any) -> Any:
        """The output of a call, with its gradient shown on its way."""
        x = args[0]
        if self.needs_output(x) and isinstance(output, Tensor) and output.requires_grad:
            masked = self.mask_of(x, args[1]) is not None
            output = observe_output(output, x, masked, self._number)
        total, self._total = self._total, None
        return output if total is None else (output, total)

    def needs_output(self, x: Tensor) -> bool:
        """Whether the gradient of what comes out for x has to be seen."""
        del x
        return False

    def mask_of(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """The padding of a call: what it says itself, or the mask of the scope where it fits."""
        return mask if mask is not None else self._fitting_mask(x)

    def _fitting_mask(self, x: Tensor) -> Tensor | None:
        """The mask of the scope that has the shape of the input's tokens, if there is one."""
        scope = innermost_scope()
        shape = self._tokens_in(x).shape[:-1]
        for offered in () if scope is None else scope[0]:
            if offered.mask.shape == shape and offered.mask.dtype == torch.bool:
                return offered.mask
        return None

    def _tokens_in(self, x: Tensor) -> Tensor:
        """What goes in or out, or a gradient of it, features last."""
        return features_last(x, self.feature_dim) if has_dim(x, self.feature_dim) else x

    def see_input(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Keeps sums of the input, but not of a forward that checkpointing repeats."""
        if not in_backward():
            sums, own = self.measure_input(self._tokens_in(x), padding_mask)
            self._keep(Record(self.layer, "input", sums, own))

    @abstractmethod
    def measure_input(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(sums, own) of a `Record`, of what has its features last."""

    def see_input_gradient(self, gradient: Tensor) -> None:
        """Keeps sums of the gradient."""
        sums = gradient_sums(self._tokens_in(gradient))
        self._keep(Record(self.layer, "input gradient", sums, sums.new_empty(0)))

    def see_output_gradient(self, gradient: Tensor, x: Tensor, masked: bool) -> None:
        """Learns nothing from it; see `needs_output`."""
        del gradient, x, masked


def _never() -> bool:
    return False


class _Hook:
    """Shows the calls of a watch's module to it.

    A module's copy has copies of its hooks, which belong to nobody and do nothing.

    Args:
        watch: None in a copy.
        wanted: asked at each call.
    """

    def __init__(self, watch: NormWatch | None = None, wanted: Callable[[], bool] = _never) -> None:
        self._watch = watch
        self._wanted = wanted

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        """What `copy.deepcopy` and pickle make of it."""
        return type(self), ()

    def _watch_of(self, module: nn.Module) -> NormWatch | None:
        if not (self._wanted() and module.training):
            return None
        watch = self._watch
        # Shallow copies share the hooks themselves. Compiled code is not asked: to compare the
        # layers would be a guard on each of them, and one code could not serve several.
        if watch is None or torch.compiler.is_compiling() or module is watch.module:
            return watch
        return None


class _InputHook(_Hook):
    """In front of the module."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        watch = self._watch_of(module)
        return None if watch is None else watch.observe_input(args, kwargs)


class _OutputHook(_Hook):
    """Behind the module."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        watch = self._watch_of(module)
        return None if watch is None else watch.observe_output(args, output)


class TokenWatch(NormWatch):
    """Sees a norm that treats every token by itself."""

    def measure_input(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """`input_sums`, and nothing else."""
        sums = input_sums(self.module, x, padding_mask)
        return sums, sums.new_empty(0)


class BatchWatch(NormWatch):
    """Sees a norm with batch statistics.

    Args:
        layer: number of the norm in the model.
        module: the norm.
        keep: gets the records.
    """

    module: BatchStatisticsNorm

    def mask_of(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """As the layer finds it, with the error for a model's own mask that does not fit."""
        return mask if mask is not None else current_padding_mask(self._tokens_in(x), self.module)

    def needs_output(self, x: Tensor) -> bool:
        """Whether parts of the gradient of x depend on it."""
        return x.requires_grad and needs_products(self.module)

    def measure_input(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Count, sums and sums of squares (3, C); samples of x and the layer's state."""
        tokens = wide(self.module.scaled(x)).reshape(-1, x.shape[-1])
        own = torch.cat([_samples(x), state_of(self.module).flatten()])
        return _moment_sums(tokens, padding_mask), own

    def see_output_gradient(self, gradient: Tensor, x: Tensor, masked: bool) -> None:
        """Keeps Σ ∂L/∂y and Σ ∂L/∂y t, (2, C), with t what the layer normalises."""
        x, gradient = self._tokens_in(x), self._tokens_in(gradient)
        tokens = wide(self.module.scaled(x)).reshape(-1, x.shape[-1])
        flat = wide(gradient).reshape(tokens.shape).to(tokens.dtype)
        shift = self._rough_mean(tokens)
        products = flat * (tokens - shift)
        if masked:  # padding may hold infinities, to which no gradient comes
            products = torch.where(flat != 0, products, 0.0)
        total = flat.sum(0).double()
        along = products.sum(0).double() + shift.double() * total
        sums = torch.stack([total, along])
        self._keep(Record(self.layer, "output gradient", sums, _samples(x)))

    def _rough_mean(self, tokens: Tensor) -> Tensor:
        """Anything near the mean will do: float32 products of large numbers lose digits."""
        if not self.module.centered:
            return tokens.new_zeros(())
        mean = self.module.get_buffer("running_mean").to(tokens.dtype)
        return torch.where(mean.isfinite(), mean, 0.0)


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(x, mask, residual) of a call of a norm of this library."""
    x = args[0] if args else kwargs["x"]
    mask = args[1] if len(args) > 1 else kwargs.get("padding_mask")
    residual = args[2] if len(args) > 2 else kwargs.get("residual")
    return x, mask, residual


def _samples(x: Tensor) -> Tensor:
    """A few of the values, by which a backward finds the record of its forward, (NUM_SAMPLES,)."""
    flat = x.reshape(-1)
    # Odd steps, so that not all are of one feature.
    taken = flat[:: max(1, flat.shape[0] // NUM_SAMPLES) | 1][:NUM_SAMPLES].double()
    return torch.nn.functional.pad(taken, (0, NUM_SAMPLES - taken.shape[0]))


def _moment_sums(tokens: Tensor, padding_mask: Tensor | None) -> Tensor:
    """(3, C) float64: n, Σt, Σt² over valid tokens, by two passes in the type of the tokens.

    A conversion of all tokens to float64 would take five times as long.
    """
    if padding_mask is None:
        count = tokens.new_full((), float(tokens.shape[0]), dtype=torch.float64)
        mean = tokens.sum(0) / max(tokens.shape[0], 1)
        deviations = tokens - mean
    else:
        padding = padding_mask.reshape(-1, 1)
        count = (~padding).sum(dtype=torch.float64)
        # `where`, not a product: padding may hold infinities.
        kept = torch.where(padding, 0.0, tokens)
        mean = kept.sum(0) / count.clamp(min=1).to(tokens.dtype)
        deviations = torch.where(padding, 0.0, kept - mean)
    rest = deviations.sum(0).double()
    squares = deviations.square().sum(0).double()
    mean = mean.double()
    total = count * mean + rest
    return torch.stack(
        [count.expand_as(total), total, squares + 2 * mean * rest + count * mean.square()]
    )
