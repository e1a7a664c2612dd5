"""Recorded calls of modules for a padded batch and for one row alone, and their comparison."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from powernorm.diagnosis.padded_rows import BatchRows
from powernorm.errors import InputError
from powernorm.inspection.batches import call_model
from powernorm.inspection.examples import Examples
from powernorm.inspection.modules import modules_by_name

TOLERANCE: Final = 1e-7
"""Differences below this, relative to the largest value, are rounding in float64."""
_PLAIN: Final = (int, float, str, bool, type(None), torch.dtype, torch.device)


class _CallKey(NamedTuple):
    """Key of a module's call: its name, and the number of earlier calls."""

    name: str
    number: int


class _ModuleCall(NamedTuple):
    """The input and output of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    inner: Calls
    """The calls inside it, numbered within this call."""


Calls: TypeAlias = "dict[_CallKey, _ModuleCall]"
_Forced: TypeAlias = "Callable[[_CallKey, _ModuleCall, Any], Any]"
"""Returns the replacement of an inner module's output, given the call as it was made."""


class CallRecorder:
    """Runs a model and keeps every module's input and output, in the order in which they end.

    Args:
        model: a copy that nothing else needs: the hooks stay.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = modules_by_name(model)
        self._calls: Calls | None = None
        self._open: list[_ModuleCall] = []
        self._forced: _Forced | None = None
        names = {module: name for name, module in reversed(self.modules.items())}
        for module, name in names.items():
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            # A model may catch the error of a call and make another one.
            module.register_forward_hook(self._after(name), always_call=True)

    def run(self, call: Examples) -> Calls:
        """Run the model."""
        self._calls, self._open = {}, []
        try:
            # By the same rules as for batches elsewhere: labels must not become a mask.
            call_model(self.model, call.kwargs if call.kwargs and not call.args else call.args)
            return self._calls
        finally:
            self._calls = None

    def run_alone(self, call: Examples, row: int) -> Calls:
        """Run the model on one row.

        Raises:
            InputError: the model cannot run it.
        """
        try:
            return self.run(call)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"the model cannot run row {row} alone ({error}): each tensor of the batch is cut "
                "to the row and its length, so all have to be (batch, length, …)"
            ) from error

    def own_output(self, name: str, args: Any, kwargs: Any, forced: _Forced) -> Any:
        """Run a module, with the results of `forced` in place of its inner modules' outputs."""
        self._forced, self._open = forced, []
        try:
            return self.modules[name](*args, **kwargs)
        finally:
            self._forced = None

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        # Copies, because a later module may write into them, and a cache of keys grows.
        self._open.append(_ModuleCall(_kept(args), _kept(kwargs), None, {}))

    def _after(self, name: str) -> Callable[..., Any]:
        def end(_: nn.Module, __: Any, output: Any) -> Any:
            call = self._open.pop()._replace(output=_kept(output))
            if output is None:  # the call failed, or there is nothing to compare
                return None
            if self._calls is not None:
                self._calls[_next(self._calls, name)] = call
            if self._open:
                inner = self._open[-1].inner
                key = _next(inner, name)
                inner[key] = call
                if self._forced is not None and len(self._open) == 1:
                    return self._forced(key, call, output)
            return None

        return end


def _next(calls: Mapping[_CallKey, Any], name: str) -> _CallKey:
    keys = (_CallKey(name, number) for number in itertools.count())
    return next(key for key in keys if key not in calls)


def _kept(value: Any) -> Any:
    """Return a copy that later calls do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(map(_kept, value))
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


class _UnlikeError(Exception):
    """Two values cannot be compared."""


@dataclass
class Difference:
    """The difference of two values."""

    relative: float
    """Largest distance over the largest value."""
    reach: int | None
    """Number of positions of a row that differ; None if the value has no positions."""

    def joined(self, other: Difference) -> Difference:
        """Return the larger of both."""
        reach = max((one for one in (self.reach, other.reach) if one is not None), default=None)
        return Difference(max(self.relative, other.relative), reach)


class RowComparison:
    """The differences of all rows, by module.

    Args:
        recorder: recorder of the model.
        rows: rows of the batch.
        whole: calls for the batch.

    Attributes:
        leaks: differences of modules that let padding in, by dotted name.
        differing: modules whose output differs for any reason.
        not_compared: why the outputs of a module cannot be compared.
        difference: difference of the model's output.
        num_rows: number of compared rows.
        num_changed: number of rows whose largest output is at another index.
    """

    def __init__(self, recorder: CallRecorder, rows: BatchRows, whole: Calls) -> None:
        self._recorder = recorder
        self._rows = rows
        self._whole = whole
        self.leaks: dict[str, Difference] = {}
        self.differing: dict[str, None] = {}
        self.not_compared: dict[str, str] = {}
        self.difference = 0.0
        self.num_rows = self.num_changed = 0

    def add(self, row: int, alone: Calls) -> None:
        """Compare a row with its results alone."""
        self.num_rows += 1
        for key, call in self._whole.items():
            if key not in alone:
                self.not_compared[key.name] = "it is called less often alone"
                continue
            try:
                if not key.name and next(_pairs(call.output, alone[key].output), None) is None:
                    raise _UnlikeError(f"it returns no tensors, but a {type(call.output).__name__}")
                found = self._compared(call.output, alone[key].output, row)
            except _UnlikeError as error:
                self.not_compared[key.name] = str(error)
                continue
            if found.relative > TOLERANCE:
                self.differing.setdefault(key.name)
                try:
                    self._add_leak(key, call, alone[key], row)
                except _UnlikeError as error:
                    self.not_compared[key.name] = str(error)
            if not key.name:
                self.difference = max(self.difference, found.relative)
                self.num_changed += self._is_changed(call.output, alone[key].output, row)

    def _add_leak(self, key: _CallKey, whole: _ModuleCall, alone: _ModuleCall, row: int) -> None:
        """Run a module by itself on a row of the batch without its padding.

        Its calls of inner modules are compared as well as its output.
        """
        args = self._cut_all(whole.args, alone.args, row)
        kwargs = self._cut_all(whole.kwargs, alone.kwargs, row)
        found = [Difference(0.0, None)]

        def forced(inner: _CallKey, call: _ModuleCall, output: Any) -> Any:
            if inner not in whole.inner:
                raise _UnlikeError(f"it calls {inner.name} more often alone")
            there = whole.inner[inner]
            for one, other in ((there.args, call.args), (there.kwargs, call.kwargs)):
                found.append(self._compared(one, other, row))
            return self._cut_all(there.output, output, row)

        try:
            output = self._recorder.own_output(key.name, args, kwargs, forced)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise _UnlikeError(f"it cannot run by itself ({error})") from error
        found.append(self._compared(whole.output, _kept(output), row))
        joined = functools.reduce(Difference.joined, found)
        if joined.relative > TOLERANCE:
            before = self.leaks.get(key.name, Difference(0.0, None))
            self.leaks[key.name] = before.joined(joined)

    def _compared(self, whole: Any, alone: Any, row: int) -> Difference:
        found = Difference(0.0, None)
        for one, other in _pairs(whole, alone):
            if not other.numel():
                continue
            cut = self._cut(one, other, row)
            gap = _gap(cut, other)
            size = _size(other)
            relative = float(gap.max()) / size
            if math.isnan(relative):
                relative = math.inf
            if relative > TOLERANCE:
                differs = gap > TOLERANCE * size
                found = found.joined(Difference(relative, _reach(one, other, differs)))
        return found

    def _is_changed(self, whole: Any, alone: Any, row: int) -> bool:
        for one, other in _pairs(whole, alone):
            if other.is_floating_point() and other.ndim > 1 and other.numel():
                cut = self._cut(one, other, row)
                return not torch.equal(cut.argmax(-1), other.argmax(-1))
        return False

    def _cut_all(self, whole: Any, alone: Any, row: int) -> Any:
        """Return a value of a row, with the numbers of the batch in the form that it has alone."""
        if isinstance(whole, Tensor) and isinstance(alone, Tensor):
            return self._cut(whole, alone, row).clone()
        if (
            isinstance(whole, Mapping)
            and isinstance(alone, Mapping)
            and whole.keys() == alone.keys()
        ):
            made: Any = copy.copy(alone)
            for key in alone:
                made[key] = self._cut_all(whole[key], alone[key], row)
            return made
        is_sequence = isinstance(whole, tuple | list) and isinstance(alone, tuple | list)
        is_packed = isinstance(alone, nn.utils.rnn.PackedSequence)  # its order is another one
        if is_sequence and not is_packed and len(whole) == len(alone):
            parts = [self._cut_all(*pair, row) for pair in zip(whole, alone, strict=True)]
            return type(alone)(*parts) if hasattr(alone, "_fields") else type(alone)(parts)
        return alone  # sizes, values other than tensors, and masks that are missing alone

    def _cut(self, whole: Tensor, alone: Tensor, row: int) -> Tensor:
        """Return the part of a tensor of the batch that belongs to a row.

        Its positions may differ from the row's, as in tables of relative positions, and batch and
        length may be one dimension: an equal part is used, else the most likely one.
        """
        if whole.ndim != alone.ndim:
            raise _UnlikeError(f"{whole.ndim} dimensions, alone {alone.ndim}")
        sizes = list(zip(whole.shape, alone.shape, strict=True))
        has_batch = any(pair == (len(self._rows.lengths), 1) for pair in sizes)
        starts = [self._starts(*pair, row, is_flat=not has_batch) for pair in sizes]
        if not all(starts):
            raise _UnlikeError(f"the shape {tuple(whole.shape)}, alone {tuple(alone.shape)}")
        parts = (
            whole[tuple(slice(at, at + n) for at, n in zip(chosen, alone.shape, strict=True))]
            for chosen in itertools.product(*starts)
        )
        first = next(parts)
        if all(len(one) == 1 for one in starts):
            return first
        limit = TOLERANCE * _size(alone)
        equal = (
            part
            for part in itertools.chain([first], parts)
            if not bool((_gap(part, alone) > limit).any())
        )
        return next(equal, first)

    def _starts(self, size: int, length: int, row: int, *, is_flat: bool) -> list[int]:
        """Return where a row may begin in a dimension, the most likely first."""
        if size == length:
            return [0]
        number = len(self._rows.lengths)
        if length == 1 and size == number:
            return [row]
        if length > size:
            return []
        starts = [0, size - length, (size - length) // 2]
        if self._rows.on_left:
            starts = [size - length, 0, (size - length) // 2]
        block = size // number
        if is_flat and size % number == 0 and length <= block:
            ends = [row * block, (row + 1) * block - length]
            starts = [*(reversed(ends) if self._rows.on_left else ends), *starts]
        if is_flat and size == sum(self._rows.lengths):  # valid positions, row after row
            starts.insert(0, sum(self._rows.lengths[:row]))
        return list(dict.fromkeys(starts))


def _pairs(whole: Any, alone: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield corresponding tensors; a mask that marks nothing may be missing alone."""
    if isinstance(whole, Tensor) and isinstance(alone, Tensor):
        if any(one.layout is not torch.strided or one.is_nested for one in (whole, alone)):
            raise _UnlikeError("a nested or sparse tensor")
        yield whole, alone
    elif isinstance(whole, nn.utils.rnn.PackedSequence):
        raise _UnlikeError("a packed sequence")
    elif (values := _by_name(whole)) and (others := _by_name(alone)):
        for key in values:
            yield from _pairs(values[key], others.get(key))
    elif isinstance(whole, tuple | list) and isinstance(alone, tuple | list):
        if len(whole) != len(alone):
            raise _UnlikeError(f"{len(whole)} values, alone {len(alone)}")
        for pair in zip(whole, alone, strict=True):
            yield from _pairs(*pair)


def _by_name(value: Any) -> Mapping[Any, Any]:
    """Return the values of a mapping or a dataclass, nothing of anything else."""
    if isinstance(value, Mapping):
        return value
    return (
        {one.name: getattr(value, one.name) for one in fields(value)} if is_dataclass(value) else {}
    )


def _size(values: Tensor) -> float:
    """Return the largest finite absolute value, 1 if that is 0 or there is none."""
    if not values.is_floating_point() or not values.numel():
        return 1.0
    return float(torch.where(values.isfinite(), values, 0.0).abs().max()) or 1.0


def _gap(one: Tensor, other: Tensor) -> Tensor:
    """Return the distances of elements; equal infinities, and two NaN, have distance 0."""
    if not other.is_floating_point():
        return (one != other).double()
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs())


def _reach(whole: Tensor, alone: Tensor, differs: Tensor) -> int | None:
    """Return the number of positions that differ; None for an output without positions."""
    dims = [d for d in range(alone.ndim) if whole.shape[d] != alone.shape[d] and alone.shape[d] > 1]
    if not dims:
        return None
    others = [dim for dim in range(alone.ndim) if dim != dims[0]]
    return int(differs.sum(others).count_nonzero()) if others else int(differs.sum())
