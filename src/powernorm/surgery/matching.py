"""Fitting static and pointwise norms to the outputs of a teacher's norms, to replace LayerNorm.

One pass over the data for each static layer, two for each pointwise one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, Progress, call_model, check_repeatable
from powernorm.inspection.mask_owners import attach_mask_owners
from powernorm.inspection.modules import Names, choose_among, listed, modules_by_name
from powernorm.inspection.observer import NormCall, observe
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.inspection.selection import stacks
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.arguments import check_function, check_model
from powernorm.norms.feature_dims import features_last, has_dim
from powernorm.norms.pointwise import SaturatingNorm
from powernorm.norms.preserved_state import by_itself, preserved_state
from powernorm.norms.registry import short_name
from powernorm.ops.arrays import accumulation_dtype
from powernorm.ops.moments import Moments
from powernorm.ops.processes import all_reduce_sum
from powernorm.surgery.populations import (
    adopt_statistics,
    check_not_empty,
    check_population,
    device_of,
    evaluated_statistics,
    evaluating,
    group_of,
    order_of_calls,
)

_CONSTANT: Final = 1e-6
"""A feature whose deviation is below this fraction of its mean is constant up to rounding."""

_COARSE: Final = range(-20, 20)
"""Octaves of the slopes that the first pass of a pointwise norm tries. 1/rms of its input is not
known before; so wide, all slopes that suit inputs of a scale of 1e-5 to 1e5 are among them."""

_FINE: Final = [step / 20 for step in range(-19, 20)]
"""Octaves around the best of these for the second pass: the slope is right to 1.8 percent."""

_OCTAVES: Final = 8.0

_Layer = BatchStatisticsNorm | SaturatingNorm


@dataclass(frozen=True, kw_only=True)
class MatchRow(NormRow):
    """How well a layer reproduces a teacher's norm.

    Attributes:
        tokens: number of valid tokens that the layer was fitted to, over all processes.
        explained: fraction of the variance of the teacher's outputs that the layer explains, over
            all features (R², 1 - SSE/SST); 1 is exact.
        explained_affine: the same of the best affine map per feature on the same data; of a static
            norm that is what it is fitted to.
    """

    tokens: int
    explained: float
    explained_affine: float


@dataclass(frozen=True)
class MatchReport(NormTable):
    """Report with one row per layer, in the order in which the layers were fitted."""

    rows: tuple[MatchRow, ...]


def match_teacher(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None = None,
    *,
    names: Names | None = None,
    on_progress: Progress | None = None,
) -> MatchReport:
    """Fit each static or pointwise norm of a model to the teacher's norm of the same name.

    A LayerNorm that is swapped to a static norm keeps γ and β, which then apply to features of
    unit variance, so that the model's outputs are far off. This function finds, per feature and by
    least squares over all valid tokens, the a and c for which `a x + c` is closest to the output of
    the teacher's norm of the same name. Here x is the model's own input of the norm, computed with
    the norms that were fitted before. The layer's statistics become those of x, and γ, β are set
    such that in evaluation `y = a x + c`. Of a layer that `centers`, x is its input less each
    token's mean. This is an initialization for distillation, and often
    achieves most of it. A feature of x that is constant (up to 1e-6 of its mean) gets a = 0,
    because the slope there would be noise.

    For a pointwise norm (`dyt`, `derf`, `dyisru`: `y = γ f(z) + β` with z linear in x), γ and β are
    the best for f(z) in the same sense, and the layer's scalar (α of DyT and Derf, B of
    DyISRU) is that of the best of 40 slopes of z, a factor of 2 apart, and in a second pass of 39
    around it, 3.5 percent apart. The shift s of Derf stays. The report has the R² of the layer
    beside that of the best affine map on the same data; for layer-wise functions arXiv 2605.14047
    reports 91.6 percent. Pointwise norms of the same class as the teacher's stay as they are.

    Args:
        model: a swapped *copy* of the teacher (`copy.deepcopy` before the swap), with static or
            pointwise norms; all layers of batch statistics. It may be compiled, and so may the
            teacher.
        teacher: the model as it was; both take the same batches.
        batches: each on the models' device; one pass per static layer and two per pointwise one,
            and the first batch once more before that; padding masks of the model's calls reach its
            norms as in training, and those of pointwise norms alike.
        forward: runs a model on a batch. None calls `model(batch)` for a tensor, `model(*batch)`
            for a tuple or list and `model(**batch)` for a mapping.
        names: globs over module names; the other layers evaluate as they are.
        on_progress: called after each pass with (passes done, passes in all).

    Raises:
        InputError: a layer that is neither static nor pointwise, or has no γ and β or shares its
            parameters (within the model or with the teacher), a teacher without a module of its
            name or of other shapes, no batch, no valid token, data that can be iterated over only
            once. Nothing has changed then.

    State:
        Writes the running statistics, γ and β of the layers, and the scalar of pointwise ones; a
        layer that has not seen a batch counts one.

    Distributed:
        Sums are merged over each layer's process group, those of pointwise layers over the default
        one. Processes may have different numbers of batches, or none, but all have to call this
        function.

    >>> teacher = torch.nn.Sequential(torch.nn.LayerNorm(4))
    >>> model = torch.nn.Sequential(powernorm.BatchNorm(4))
    >>> report = match_teacher(model, teacher, [torch.randn(64, 4) for _ in range(3)])
    >>> report.rows[0].tokens
    192
    """
    check_model(model)
    check_model(teacher, "teacher")
    modules = modules_by_name(teacher)
    found = {
        name: module
        for name, module in modules_by_name(model).items()
        if isinstance(module, BatchStatisticsNorm)
        or (isinstance(module, SaturatingNorm) and type(module) is not type(modules.get(name)))
    }
    layers = choose_among(model, found, names, "static or pointwise layer to match")
    check_function("forward", forward)
    check_function("on_progress", on_progress)
    passes = _Passes(model, teacher, layers, batches, forward or call_model, on_progress)
    check_repeatable(batches, f"to find the order of the layers and to fit them {1 + passes.total}")
    _check_layers(layers, modules)
    _check_own(model, layers, teacher)
    fitted: dict[str, _Fit] = {}
    with (
        by_itself(model),
        preserved_state(model, layers.values()),
        preserved_state(teacher, ()),
        _masks_for_pointwise(model, layers),
    ):
        before = {name: deepcopy(dict(layer.named_parameters())) for name, layer in layers.items()}
        try:
            for name in _order(model, layers, batches, passes.run):
                fitted[name] = passes.fit(name, modules[name])
                _adopt(layers[name], fitted[name])
        finally:
            for name, parameters in before.items():
                for attribute, value in parameters.items():
                    layers[name].get_parameter(attribute).copy_(value)
    for name, fit in fitted.items():
        _adopt(layers[name], fit)
    rows = [
        MatchRow(
            name=name,
            kind=short_name(layers[name]),
            action="match",
            tokens=int(fit.moments.count),
            explained=fit.explained,
            explained_affine=fit.explained_affine,
        )
        for name, fit in fitted.items()
    ]
    return MatchReport(tuple(rows))


@dataclass
class _Fit:
    """The population of a norm's input, and the map that its layer is set to."""

    moments: Moments
    scale: Tensor
    shift: Tensor
    explained: float
    explained_affine: float
    slope: float | None = None
    """dz/dx of a norm that saturates."""


@dataclass
class _LeastSquaresSums:
    """Sums over valid tokens for the maps of a layer's input, in float64."""

    name: str
    maps: Sequence[Callable[[Tensor], Tensor]]
    """K functions of x, (..., C)."""
    moments: Moments | None = None
    """Moments of the outputs of the maps, (K C,)."""
    products: Tensor | None = None
    """Sums with rows Σ y, Σ y², then Σ f(x) y for each map f, (2 + K, C)."""

    def add(self, call: NormCall, y: Tensor, dim: int) -> None:
        """Add a call of the norm and the teacher's output, whose features are in `dim`."""
        x, mask = call.x, call.padding_mask
        if has_dim(y, dim):
            y = features_last(y, dim)
        if y.shape != x.shape:
            raise InputError(
                f"the teacher's {self.name!r} put out {tuple(y.shape)} where the model's norm got "
                f"{tuple(x.shape)}: both have to be the same architecture on the same batch"
            )
        if mask is None:
            x, y = x.flatten(0, -2), y.flatten(0, -2)
        else:
            x, y = x[~mask], y[~mask]
        outputs = y.double()
        rows, found = [outputs.sum(0), outputs.square().sum(0)], []
        for function in self.maps:
            inputs = function(x).double()
            found.append(Moments.of(inputs))
            rows.append((inputs * outputs).sum(0))
        moments = Moments(
            found[0].count,
            torch.cat([one.mean for one in found]),
            torch.cat([one.squares for one in found]),
        )
        products = torch.stack(rows)
        self.moments = moments if self.moments is None else self.moments.merge(moments)
        self.products = products if self.products is None else self.products + products

    def best(self, layer: _Layer, slopes: Sequence[float]) -> _Fit:
        """Return the best least-squares fit over the sums of all processes.

        Left out are slopes beyond 2^±8 around 1/rms of x, if others are there: f is linear or a
        step where they explain most, and γ would be large without need.

        Args:
            layer: the layer.
            slopes: those of the maps behind the first; without them the first is the best.
        """
        device, group, features = device_of(layer), group_of(layer), layer.num_features
        moments = self.moments or Moments.zero(len(self.maps) * features, device)
        products = self.products
        if products is None:
            shape = (2 + len(self.maps), features)
            products = torch.zeros(shape, dtype=torch.float64, device=device)
        moments = moments.all_reduce(group)
        products = all_reduce_sum(products, group)
        first = Moments(moments.count, moments.mean[:features], moments.squares[:features])
        check_population(self.name, layer, first)
        mean_y, square_y, *both = products / moments.count.double()
        mean, variance = moments.mean.view(-1, features), moments.var.view(-1, features)
        covariance = torch.stack(both) - mean * mean_y
        varies = variance > (_CONSTANT * mean).square()
        scale = torch.where(varies, covariance / variance.clamp(min=1e-300), 0.0)
        left = (square_y - mean_y.square() - scale * covariance).sum(-1)
        explained = 1 - left / (square_y - mean_y.square()).sum().clamp(min=1e-300)
        index, slope = 0, None
        if slopes:
            every = torch.tensor(slopes, dtype=torch.float64, device=device)
            rms = first.second_moment.mean().sqrt().clamp(min=1e-300)
            octaves = (every * rms).log2().abs()
            far = octaves > max(_OCTAVES, float(octaves.min()))
            best = int(explained[1:].masked_fill(far, -math.inf).argmax())
            index, slope = 1 + best, slopes[best]
        share, affine = float(explained[index]), float(explained[0])
        shift = mean_y - scale[index] * mean[index]
        return _Fit(first, scale[index], shift, share, affine, slope)


@dataclass
class _Passes:
    """Passes over the data, and what they go through."""

    model: nn.Module
    teacher: nn.Module
    layers: Mapping[str, _Layer]
    batches: Iterable[Any]
    run: Forward
    on_progress: Progress | None
    done: int = 0

    @property
    def total(self) -> int:
        """Number of passes that fit all layers."""
        return sum(2 if isinstance(one, SaturatingNorm) else 1 for one in self.layers.values())

    def fit(self, name: str, taught: nn.Module) -> _Fit:
        """Return the fit of one layer to the teacher's norm."""
        layer = self.layers[name]
        if not isinstance(layer, SaturatingNorm):
            return self._fit_once(name, taught, [layer.scaled])
        best = 1.0
        for steps in (_COARSE, _FINE):
            slopes = [best * 2**step for step in steps]
            maps = [partial(_saturated, layer, slope) for slope in slopes]
            fit = self._fit_once(name, taught, [Tensor.double, *maps], slopes)
            assert fit.slope is not None
            best = fit.slope
        return fit

    def _fit_once(
        self,
        name: str,
        taught: nn.Module,
        maps: Sequence[Callable[[Tensor], Tensor]],
        slopes: Sequence[float] = (),
    ) -> _Fit:
        """Go through the data once."""
        sums = _LeastSquaresSums(name, maps)
        calls: list[NormCall] = []
        outputs: list[Tensor] = []
        dim = self.layers[name].feature_dim

        def keep(call: NormCall) -> None:
            if call.name == name:
                calls.append(call)

        def keep_output(name: str, output: object) -> None:
            del name
            outputs.append(cast(Tensor, output[0] if isinstance(output, tuple) else output))

        with (
            evaluating(self.layers, keep),
            observe({name: taught}, on_output=keep_output),
            torch.random.fork_rng(devices=[]),
        ):
            for batch in self.batches:
                self.run(self.teacher, batch)
                self.run(self.model, batch)
                if len(calls) != len(outputs):
                    raise InputError(
                        f"on one batch the model calls {name!r} {len(calls)} times and the "
                        f"teacher {len(outputs)} times: both have to run alike"
                    )
                for call, output in zip(calls, outputs, strict=True):
                    sums.add(call, output, dim)
                calls.clear()
                outputs.clear()
        fit = sums.best(self.layers[name], slopes)
        self.done += 1
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)
        return fit


def _saturated(layer: SaturatingNorm, slope: float, x: Tensor) -> Tensor:
    return layer.saturate(layer.argument(x.to(accumulation_dtype(x)), slope))


@contextmanager
def _masks_for_pointwise(model: nn.Module, layers: Mapping[str, _Layer]) -> Iterator[None]:
    """In the block, offer the model's own masks to those who observe norms without statistics."""
    modules = dict(model.named_modules(remove_duplicate=False))
    fitted = {layer for layer in layers.values() if isinstance(layer, SaturatingNorm)}
    names = [name for name, module in modules.items() if name and module in fitted]
    uses = attach_mask_owners(model, names, stacks(model, names), observed=True)
    try:
        yield
    finally:
        for use in uses:
            use.release()


def _order(
    model: nn.Module,
    layers: Mapping[str, _Layer],
    batches: Iterable[Any],
    run: Forward,
) -> list[str]:
    """Return the layers in the order of their first calls on the first batch."""
    called: dict[str, None] = {}

    def note(call: NormCall) -> None:
        called.setdefault(call.name)

    num_batches = 0
    with evaluating(layers, note):
        for batch in batches:
            run(model, batch)
            num_batches = 1
            break
    check_not_empty(num_batches, layers)
    return order_of_calls(layers, called, "the first batch does not go")


def _check_layers(layers: Mapping[str, _Layer], teacher: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        kind = type(layer).__name__
        if not (layer.is_static or layer.centers or isinstance(layer, SaturatingNorm)):
            raise InputError(
                f"{name!r} ({kind} with groups) is not static: an affine map cannot stand for it"
            )
        if layer.weight is None or layer.bias is None:
            raise InputError(f"{name!r} ({kind}) has no weight and bias to be fitted: affine=True")
        if name not in teacher:
            raise InputError(
                f"the teacher has no module {name!r}: give the model as it was before the swap"
            )


def _check_own(model: nn.Module, layers: Mapping[str, _Layer], teacher: nn.Module) -> None:
    """Raise an InputError if fitting one layer would change another, or the teacher."""
    if teacher is model:
        raise InputError(
            "teacher is the model itself, which has to stay as it was: "
            "teacher = copy.deepcopy(model) before the swap"
        )
    holders, taught = _holders(model), _holders(teacher)
    for name, layer in layers.items():
        for key, parameter in layer.named_parameters(recurse=False):
            place = _place(parameter)
            if place in taught:
                raise InputError(
                    f"{key} of {name!r} is the teacher's {taught[place][0]!r} too, so that fitting "
                    "would change the teacher: teacher = copy.deepcopy(model) before the swap"
                )
            others = [holder for holder in holders[place] if holder != f"{name}.{key}".lstrip(".")]
            if others:
                raise InputError(
                    f"{key} of {name!r} is shared with {listed(others)}, so that fitting one would "
                    "change the other: give each a parameter of its own, or leave the layer out "
                    "by `names`"
                )


def _holders(model: nn.Module) -> dict[object, list[str]]:
    """Return the names under which modules hold each parameter.

    A module that is used twice counts once.
    """
    found: dict[object, list[str]] = {}
    for name, module in modules_by_name(model).items():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(_place(parameter), []).append(f"{name}.{key}".lstrip("."))
    return found


def _place(parameter: Tensor) -> object:
    """Return a key that is equal for parameters in the same memory.

    `load_state_dict(assign=True)` makes new objects around the same memory.
    """
    return parameter.device, parameter.data_ptr() or id(parameter)


@torch.no_grad()
def _adopt(layer: _Layer, fit: _Fit) -> None:
    """Write what the fit says: of a static layer such that y = a x + c in evaluation."""
    assert layer.weight is not None
    assert layer.bias is not None
    if isinstance(layer, SaturatingNorm):
        assert fit.slope is not None
        layer.set_slope(fit.slope)
        layer.weight.copy_(fit.scale)
        layer.bias.copy_(fit.shift)
        return
    adopt_statistics(layer, evaluated_statistics(layer, fit.moments))
    layer.bias.zero_()
    # The map is linear in γ, and with a branch around the norm not 0 where γ is.
    layer.weight.zero_()
    start, start_shift = layer.affine()
    layer.weight.fill_(1)
    scale, shift = layer.affine()
    weight = (fit.scale - start) / (scale - start)
    layer.weight.copy_(weight)
    layer.bias.copy_(fit.shift - start_shift - weight * (shift - start_shift))
