"""Fitting static norms to the outputs of a teacher's norms, to replace LayerNorm by static norms.

One pass over the data for each layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, Progress, call_model, check_repeatable
from powernorm.inspection.modules import Names, choose_layers, listed, modules_by_name
from powernorm.inspection.observer import NormCall, observe
from powernorm.inspection.rows import NormRow, NormTable
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.arguments import check_function, check_model
from powernorm.norms.feature_dims import features_last, has_dim
from powernorm.norms.preserved_state import by_itself, preserved_state
from powernorm.norms.registry import short_name
from powernorm.ops.moments import Moments
from powernorm.ops.processes import all_reduce_sum
from powernorm.surgery.populations import (
    adopt_statistics,
    check_not_empty,
    check_population,
    evaluated_statistics,
    evaluating,
    order_of_calls,
)

_CONSTANT: Final = 1e-6
"""A feature whose deviation is below this fraction of its mean is constant up to rounding."""


@dataclass(frozen=True, kw_only=True)
class MatchRow(NormRow):
    """How well an affine map per feature reproduces a teacher's norm.

    Attributes:
        tokens: number of valid tokens that the map was fitted to, over all processes.
        explained: fraction of the variance of the teacher's outputs that the map explains, over
            all features; 1 is exact.
    """

    tokens: int
    explained: float


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
    """Fit each static norm of a model to the teacher's norm of the same name.

    A LayerNorm that is swapped to a static norm keeps γ and β, which then apply to features of
    unit variance, so that the model's outputs are far off. This function finds, per feature and by
    least squares over all valid tokens, the a and c for which `a x + c` is closest to the output of
    the teacher's norm of the same name. Here x is the model's own input of the norm, computed with
    the norms that were fitted before. The layer's statistics become those of x, and γ, β are set
    such that in evaluation `y = a x + c`. Of a layer that `centers`, x is its input less each
    token's mean. This is an initialization for distillation, and often
    achieves most of it. A feature of x that is constant (up to 1e-6 of its mean) gets a = 0,
    because the slope there would be noise.

    Args:
        model: a swapped *copy* of the teacher (`copy.deepcopy` before the swap), with static
            norms; all layers of batch statistics. It may be compiled, and so may the teacher.
        teacher: the model as it was; both take the same batches.
        batches: each on the models' device; one pass per layer, and the first batch once more
            before that; calls of the model give its norms padding masks as in training.
        forward: runs a model on a batch. None calls `model(batch)` for a tensor, `model(*batch)`
            for a tuple or list and `model(**batch)` for a mapping.
        names: globs over module names; the other layers evaluate as they are.
        on_progress: called after each pass with (passes done, passes in all).

    Raises:
        InputError: a layer that is not static or has no γ and β or shares them (within the model
            or with the teacher), a teacher without a module of its name or of other shapes, no
            batch, no valid token, data that can be iterated over only once. Nothing has changed
            then.

    State:
        Writes the running statistics, γ and β of the layers; a layer that has not seen a batch
        counts one.

    Distributed:
        Sums are merged over each layer's process group. Processes may have different numbers of
        batches, or none, but all have to call this function.

    >>> teacher = torch.nn.Sequential(torch.nn.LayerNorm(4))
    >>> model = torch.nn.Sequential(powernorm.BatchNorm(4))
    >>> report = match_teacher(model, teacher, [torch.randn(64, 4) for _ in range(3)])
    >>> report.rows[0].tokens
    192
    """
    layers = choose_layers(model, names, "to match")
    check_model(teacher, "teacher")
    check_function("forward", forward)
    check_function("on_progress", on_progress)
    check_repeatable(batches, f"to find the order of the layers and to fit them {1 + len(layers)}")
    modules = modules_by_name(teacher)
    _check_layers(layers, modules)
    _check_own(model, layers, teacher)
    run = forward or call_model
    fitted: dict[str, _Fit] = {}
    with by_itself(model), preserved_state(model, layers.values()), preserved_state(teacher, ()):
        before = {name: deepcopy(dict(layer.named_parameters())) for name, layer in layers.items()}
        try:
            for name in _order(model, layers, batches, run):
                sums = _LeastSquaresSums(name)
                sums.collect(model, teacher, layers, batches, run, modules[name])
                fitted[name] = sums.fit(layers[name])
                _adopt(layers[name], fitted[name])
                if on_progress is not None:
                    on_progress(len(fitted), len(layers))
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
        )
        for name, fit in fitted.items()
    ]
    return MatchReport(tuple(rows))


@dataclass
class _Fit:
    """The population of a norm's input, and its best affine map."""

    moments: Moments
    scale: Tensor
    shift: Tensor
    explained: float


@dataclass
class _LeastSquaresSums:
    """Sums over valid tokens, each (C,) float64."""

    name: str
    moments: Moments | None = None
    products: Tensor | None = None
    """Sums with rows Σ y, Σ y², Σ x y."""

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
        valid = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else ~mask
        layer = cast(BatchStatisticsNorm, call.module)
        inputs, outputs = layer.scaled(x)[valid].double(), y[valid].double()
        moments = call.moments()
        rows = torch.stack([outputs.sum(0), outputs.square().sum(0), (inputs * outputs).sum(0)])
        self.moments = moments if self.moments is None else self.moments.merge(moments)
        self.products = rows if self.products is None else self.products + rows

    def collect(
        self,
        model: nn.Module,
        teacher: nn.Module,
        layers: Mapping[str, BatchStatisticsNorm],
        batches: Iterable[Any],
        run: Forward,
        taught: nn.Module,
    ) -> None:
        """Add the sums of one pass over the data; `taught` is the teacher's norm."""
        calls: list[NormCall] = []
        outputs: list[Tensor] = []
        dim = layers[self.name].feature_dim

        def keep(call: NormCall) -> None:
            if call.name == self.name:
                calls.append(call)

        def keep_output(name: str, output: object) -> None:
            del name
            outputs.append(cast(Tensor, output[0] if isinstance(output, tuple) else output))

        with (
            evaluating(layers, keep),
            observe({self.name: taught}, on_output=keep_output),
            torch.random.fork_rng(devices=[]),
        ):
            for batch in batches:
                run(teacher, batch)
                run(model, batch)
                if len(calls) != len(outputs):
                    raise InputError(
                        f"on one batch the model calls {self.name!r} {len(calls)} times and the "
                        f"teacher {len(outputs)} times: both have to run alike"
                    )
                for call, output in zip(calls, outputs, strict=True):
                    self.add(call, output, dim)
                calls.clear()
                outputs.clear()

    def fit(self, layer: BatchStatisticsNorm) -> _Fit:
        """Return the least-squares fit over the sums of all processes."""
        device = layer.num_batches_tracked.device
        moments = self.moments or Moments.zero(layer.num_features, device)
        products = self.products
        if products is None:
            products = torch.zeros(3, layer.num_features, dtype=torch.float64, device=device)
        moments = moments.all_reduce(layer.group_name)
        products = all_reduce_sum(products, layer.group_name)
        check_population(self.name, layer, moments)
        count = moments.count.double()
        mean, (mean_y, square_y, both) = moments.mean.double(), products / count
        variance, covariance = moments.var.double(), both - mean * mean_y
        varies = variance > (_CONSTANT * mean).square()
        scale = torch.where(varies, covariance / variance.clamp(min=1e-300), 0.0)
        left = (square_y - mean_y.square() - scale * covariance).sum()
        spread = (square_y - mean_y.square()).sum().clamp(min=1e-300)
        return _Fit(moments, scale, mean_y - scale * mean, float(1 - left / spread))


def _order(
    model: nn.Module,
    layers: Mapping[str, BatchStatisticsNorm],
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


def _check_layers(
    layers: Mapping[str, BatchStatisticsNorm], teacher: Mapping[str, nn.Module]
) -> None:
    for name, layer in layers.items():
        kind = type(layer).__name__
        if not (layer.is_static or layer.centers):
            raise InputError(
                f"{name!r} ({kind} with groups) is not static: an affine map cannot stand for it"
            )
        if layer.weight is None or layer.bias is None:
            raise InputError(f"{name!r} ({kind}) has no weight and bias to be fitted: affine=True")
        if name not in teacher:
            raise InputError(
                f"the teacher has no module {name!r}: give the model as it was before the swap"
            )


def _check_own(
    model: nn.Module, layers: Mapping[str, BatchStatisticsNorm], teacher: nn.Module
) -> None:
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
def _adopt(layer: BatchStatisticsNorm, fit: _Fit) -> None:
    """Write the input's statistics, then γ and β such that y = a x + c in evaluation."""
    assert layer.weight is not None
    assert layer.bias is not None
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
