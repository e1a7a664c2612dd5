"""Zeros at padding before operators that see several positions, so that padding has no effect.

A convolution mixes padding into the last positions of a sequence, in evaluation too. While a module
that takes a mask runs, each call of a convolution or pooling, as a module or a function, gets its
input with zeros (for a maximum, with the lowest number) at padding: the values that a convolution
itself puts around a sequence without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from powernorm.errors import InputError
from powernorm.inspection.mask_checks import MaskChecks
from powernorm.inspection.mask_owners import attach_mask_owners
from powernorm.inspection.modules import ReplacedForward
from powernorm.inspection.selection import stacks
from powernorm.norms.checkpointing import CallRecords, SeenInputs
from powernorm.norms.masks import current_padding_mask, padding_after
from powernorm.ops.graphs import is_known, is_traced, same_sizes, shape_of
from powernorm.ops.torch_private import in_backward, may_be_repeated

_CONVOLUTIONS: Final = (torch.conv1d, torch.conv2d)
_MAXIMA: Final = (torch.max_pool1d, torch.max_pool2d, functional.max_pool1d, functional.max_pool2d)
_MEANS: Final = (torch.avg_pool1d, functional.avg_pool1d, functional.avg_pool2d)
_WINDOWS: Final[Mapping[Any, Sequence[str]]] = {
    **dict.fromkeys(_CONVOLUTIONS, ("weight", "bias", "stride", "padding", "dilation")),
    **dict.fromkeys(_MAXIMA, ("kernel_size", "stride", "padding", "dilation", "ceil_mode")),
    **dict.fromkeys(_MEANS, ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")),
}
"""Functions that get zeros, or the lowest number, and the names of their arguments."""
_MODULES: Final = (
    nn.Conv1d, nn.Conv2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
)  # fmt: skip
_OTHERS: Final = (
    torch.conv_transpose1d, torch.conv_transpose2d, torch.adaptive_avg_pool1d,
    functional.adaptive_avg_pool1d, functional.adaptive_max_pool1d, functional.unfold,
    functional.interpolate, torch.stft, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
    functional.max_pool1d_with_indices, functional.max_pool2d_with_indices,
)  # fmt: skip
"""Functions that see several positions, too, but get no zeros."""
_SEEN: Final = frozenset({*_WINDOWS, *_OTHERS, functional.pad})


def erase_padding(model: nn.Module, names: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Put hooks on the modules that take the masks of norms; yield the function that removes them.

    Args:
        model: its masks mark padding, in evaluation too.
        names: dotted names of the norms, or of other modules inside those.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    around: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for name in names:
        parent, _, attribute = name.rpartition(".")
        for use in attach_mask_owners(model, [name], stacks(model, list(names)), evaluated=True):
            yield use.release
            if not (use.owner.defers or use.owner.around):
                around.setdefault(use.owner.module, []).append((modules[parent], attribute))
    for module, slots in around.items():
        yield PaddingEraser(module, slots).remove


def erased_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names for which `erase_padding` was called."""
    names = {module: name for name, module in model.named_modules()}
    forwards = [module.__dict__.get("forward") for module in names]
    slots = [slot for one in forwards if isinstance(one, PaddingEraser) for slot in one.slots]
    places = (f"{names[parent]}.{name}".lstrip(".") for parent, name in slots if parent in names)
    return tuple(dict.fromkeys(places))


class PaddingEraser(ReplacedForward):
    """A forward that wraps a module's own, and hooks on the convolutions and poolings inside.

    Hooks around the module's calls would leave the mode on if an export fails or a user
    interrupts.

    Args:
        module: module that takes a mask.
        slots: parents and attributes of the norms inside.
    """

    def __init__(self, module: nn.Module, slots: Sequence[tuple[nn.Module, str]]) -> None:
        super().__init__(module)
        self.slots = slots
        self._records = CallRecords()
        self._mode: _Mode | None = None  # mode of the running call
        self.running: list[nn.Module] = []
        """Running convolutions and poolings that a repetition can find again."""
        self.checks = MaskChecks(module)
        self.sides: dict[tuple[int, ...], None] = {}
        """Numbers of positions that were added around inputs."""
        self.was_called = False
        """Whether an eager call has shown these numbers."""
        self._handles: list[RemovableHandle] = []
        for part in module.modules():
            if isinstance(part, _MODULES):
                self._handles.append(part.register_forward_pre_hook(self.enter))
                self._handles.append(part.register_forward_hook(self.leave, always_call=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward and intercept the functions that it calls."""
        # Each thread's call has its own mode.
        self._mode = mode = _Mode(self, type(self.module).__name__)
        self.running.clear()
        with mode:
            output = self.call_replaced(args, kwargs)
        self._mode = None
        if not torch.compiler.is_compiling():
            self.was_called = True
        return output

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Record the mask of a call that a checkpoint may repeat; in the repetition erase by it.

        A repetition runs inside a backward, without the hooks of the outer modules.
        """
        self.running.append(module)
        if torch.compiler.is_compiling() or not module.training or not may_be_repeated():
            return None
        x = args[0]
        mask, dim = (self._mode.mask_of(x, (2, 3), module) if self._mode else None) or (None, 0)
        seen = self._records.replay(type(module).__name__, x, SeenInputs(mask, dim, ()))
        if not in_backward() or seen.padding_mask is None:
            return None
        value = _lowest(x) if isinstance(module, nn.MaxPool1d | nn.MaxPool2d) else 0.0
        return (_filled(x, seen.padding_mask, seen.stage, value), *args[1:])

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Leave a convolution or pooling."""
        del module, args, output
        self.running.pop()

    def remove(self) -> None:
        """Remove the hooks, and restore the module's own forward."""
        for handle in self._handles:
            handle.remove()
        super().remove()


class _Mode(TorchFunctionMode):
    """Erases padding in functions' inputs, and follows the mask through changes of the length.

    Args:
        eraser: has the observations of earlier calls.
        owner: class of the module that is called, for messages.
    """

    def __init__(self, eraser: PaddingEraser, owner: str) -> None:
        super().__init__()
        self._eraser = eraser
        self._owner = owner
        self._made: list[Tensor] = []  # masks after padding and strides

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, with zeros at padding if it sees several positions."""
        del types
        kwargs = kwargs or {}
        if func not in _SEEN:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or x.ndim < 3:
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "input"}
        if func in _WINDOWS:
            return self._windowed(func, x, args[1:], kwargs)
        output = func(x, *args[1:], **kwargs)
        if func is functional.pad:
            self._follow_padding(x, *args[1:], **kwargs)
        elif not is_traced() and func in _OTHERS:
            found = self.mask_of(x, (1, 2), func.__name__)
            if found is not None and bool(found[0].any()):
                self._warn(func, "sees padded positions, which nothing clears for it")
        return output

    def mask_of(self, x: Tensor, dims: Sequence[int], place: object) -> tuple[Tensor, int] | None:
        """Return the mask (sequences, positions) of an input and the dimension of its positions.

        Args:
            x: the input, whose first dimension counts the sequences.
            dims: dimensions that may hold the positions.
            place: receiver of the input, whose earlier calls may have shown the order.
        """
        for dim in (dim for dim in dims if dim < x.ndim):
            sizes = (shape_of(x)[0], shape_of(x)[dim])
            mask = current_padding_mask(_tokens(x, dim), place, strict=False)
            if mask is None or same_sizes(shape_of(mask), sizes) is False:
                made, given = [*self._made], current_padding_mask()
                if given is not None and torch.compiler.is_dynamo_compiling():
                    # Calls of F.pad are not visible to it.
                    made += [functional.pad(given, one, value=False) for one in self._eraser.sides]
                mask = next((one for one in made if same_sizes(shape_of(one), sizes) is True), None)
            if mask is not None:
                return mask, dim
        return None

    def _check_misfit(self, func: Any, x: Tensor, place: object) -> None:
        if same_sizes(shape_of(x)[2:], (1,) * (x.ndim - 2)) is True:
            return  # pooled over the positions
        given = current_padding_mask()
        if given is None:  # raises or warns if there is one that cannot be read
            current_padding_mask(_tokens(x, 2), place)
        elif same_sizes(shape_of(given)[:1], shape_of(x)[:1]):
            if torch.compiler.is_dynamo_compiling() and not self._eraser.was_called:
                raise InputError(
                    f"{func.__name__} in {self._owner} got an input {tuple(x.shape)} that the mask "
                    "does not fit, and padding added around it is not seen in compiled code: call "
                    "the model once before it is compiled"
                )
            self._warn(func, f"got an input {tuple(x.shape)} that the mask does not fit")

    def _windowed(self, func: Any, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        place = self._eraser.running[-1] if self._eraser.running else func.__name__
        found = self.mask_of(x, (2, 3), place)
        if found is None:
            self._check_misfit(func, x, place)
            return func(x, *args, **kwargs)
        mask, dim = found
        # A repetition finds the masks of the modules' calls again, but not those of functions.
        may_repeat = not is_traced() and torch.is_grad_enabled() and may_be_repeated()
        if may_repeat and not self._eraser.running:
            raise InputError(
                f"{func.__name__} is called as a function under activation checkpointing, whose "
                "repetition in the backward would see padding: make it a module of torch.nn, or "
                "leave this part out of the checkpoint"
            )
        given = {**dict(zip(_WINDOWS[func], args, strict=False)), **kwargs}
        if func in _MEANS and not given.get("count_include_pad", True):
            self._warn(func, "divides by the number of positions, and padding counts")
        value = _lowest(x) if func in _MAXIMA else 0.0
        y = func(_filled(x, mask, dim, value), *args, **kwargs)
        size = shape_of(y)[dim]
        if is_known(size != shape_of(x)[dim]) and self.mask_of(y, (dim,), None) is None:
            self._follow_windows(mask, size, func, given, dim - 2)
        return y

    def _follow_windows(
        self, mask: Tensor, length: int, func: Any, given: Mapping[str, Any], axis: int
    ) -> None:
        """Record the mask after strides and windows."""

        def of(name: str, default: Any) -> Any:
            value = given.get(name)
            value = default if value is None or value == () else value
            return value[min(axis, len(value) - 1)] if isinstance(value, (tuple, list)) else value

        size = given["weight"].shape[2 + axis] if "weight" in given else of("kernel_size", 1)
        stride = of("stride", size if "kernel_size" in given else 1)
        padded, dilation = of("padding", 0), of("dilation", 1)
        lengths = (~mask).sum(1)
        if isinstance(padded, str) or (
            not is_traced() and not torch.equal(mask, padding_after(lengths, mask.shape[1]))
        ):
            self._warn(func, "changes the number of positions, and padding is not at their end")
            return
        lengths = (lengths + 2 * padded - dilation * (size - 1) - 1) // stride + 1
        self._made.append(padding_after(lengths, length))

    def _follow_padding(
        self, x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
    ) -> None:
        """Record the mask of an input with zeros before and after it."""
        for index in range(len(pad) // 2):
            dim, sides = x.ndim - 1 - index, tuple(pad[2 * index : 2 * index + 2])
            found = self.mask_of(x, (dim,), "pad") if dim and sides != (0, 0) else None
            if found is None:
                continue
            if mode != "constant" or value:
                self._warn(functional.pad, f"pads by {mode}{f' {value}' * bool(value)}, not zeros")
            self._made.append(functional.pad(found[0], sides, value=False))
            if not is_traced():
                self._eraser.sides[sides] = None

    def _warn(self, func: Any, what: str) -> None:
        """Give a warning once, and none from compiled code."""
        if not torch.compiler.is_compiling():
            message = (
                f"{func.__name__} in {self._owner} {what}: the last positions of a padded sequence "
                "differ from those of the same sequence alone"
            )
            self._eraser.checks.warn(message, message)


def _tokens(x: Tensor, dim: int) -> Tensor:
    """Return a view (sequences, positions, some features) of x, for its sizes."""
    x = x.movedim(dim, 1)
    while x.ndim > 3:
        x = x[..., 0]
    return x


def _filled(x: Tensor, mask: Tensor, dim: int, value: float) -> Tensor:
    """Return x with a value where the mask (sequences, positions along a dimension) is True."""
    for other in range(1, x.ndim):
        mask = mask if other == dim else mask.unsqueeze(other)
    return x.masked_fill(mask, value)


def _lowest(x: Tensor) -> float:
    return torch.finfo(x.dtype).min
