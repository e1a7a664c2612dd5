"""Freezing of running statistics for further training, at once or layer by layer."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.modules import Names, choose_layers, listed, torch_batch_norms
from powernorm.norms import BatchStatisticsNorm
from powernorm.norms.arguments import check_choice, check_count

FreezingOrder = Literal["lowest_first", "highest_first"]
"""End of the model at which a schedule begins, in the order in which its layers are registered."""

_PURPOSE = "to freeze"


class FreezingState(TypedDict):
    """State of a freezing schedule."""

    frozen: list[str]


def freeze_statistics(
    model: nn.Module, names: Names | None = None, *, num_layers: int | None = None
) -> list[str]:
    """Make layers use their running statistics in training too, and keep these fixed.

    A frozen layer computes the same in training and in evaluation, and if it is static it is an
    affine map in both; γ and β continue to learn. It stays frozen through `model.train()`, copies,
    pickling and `load_state_dict` into the same object (the flag is not part of a state dict), and
    `powernorm.penalty` leaves it out.

    torch's own BatchNorms have no such state and stay as they are; a warning names them.

    Args:
        model: any module.
        names: globs over module names; None means all layers with batch statistics.
        num_layers: freeze only this many layers, the first in the order in which the model
            registers them, which in all usual models is the order of their calls.

    Returns:
        The names of all selected layers, frozen before or now.

    Raises:
        InputError: no such layer, fewer than num_layers, or one whose running statistics still
            have their initial values. Nothing is frozen then.

    >>> model = torch.nn.Sequential(powernorm.BatchNorm(4))
    >>> _ = model(torch.randn(8, 4))
    >>> freeze_statistics(model)
    ['0']
    >>> model.train()[0].training
    False
    """
    layers = choose_layers(model, names, _PURPOSE)
    if num_layers is not None:
        check_count("num_layers", num_layers, 1)
        if num_layers > len(layers):
            raise InputError(
                f"num_layers is {num_layers}, but there are {len(layers)} layers {_PURPOSE}: "
                f"{listed(layers)}"
            )
        layers = dict(list(layers.items())[:num_layers])
    _freeze(layers)
    others = "" if names is not None else torch_batch_norms(model)
    if others:
        warnings.warn(
            f"the statistics of the BatchNorms of torch are not frozen{others}", stacklevel=2
        )
    return list(layers)


def unfreeze_statistics(model: nn.Module, names: Names | None = None) -> list[str]:
    """Undo `freeze_statistics`: the layers take the mode of the module that holds them.

    Args:
        model: any module.
        names: globs over module names; None means all layers.

    Returns:
        The names of the layers that were frozen and no longer are.

    Raises:
        InputError: no layer with batch statistics, or a glob that matches none.
    """
    layers = choose_layers(model, names, "to unfreeze")
    return _unfreeze(model, layers)


class StatisticsFreezing:
    """Schedule that freezes the statistics of one layer after another while a model trains.

    Use it to fine-tune a pretrained LayerNorm model into one with static norms: swap, calibrate,
    and from step `start` on freeze another layer every `every` steps, so that the layers above can
    adapt before they are frozen. When all are frozen the model trains as it will be evaluated.
    The layers themselves hold the frozen state: a layer that `unfreeze_statistics` has unfrozen is
    frozen again.

    Args:
        model: any module.
        start: the step at which the first layer is frozen, ≥ 0.
        every: steps from one layer to the next, ≥ 1.
        order: from the lowest layer to the highest (the inputs of a frozen layer then come from
            layers whose statistics no longer change) or the reverse.
        names: globs over module names; None means all layers.

    Raises:
        InputError: a bad argument, no layer with batch statistics, or a glob that matches none.

    >>> model = torch.nn.Sequential(powernorm.BatchNorm(4), powernorm.BatchNorm(4))
    >>> _ = model(torch.randn(8, 4))
    >>> freezing = StatisticsFreezing(model, start=10, every=5)
    >>> [freezing.step(step) for step in (9, 10, 11, 15)]
    [[], ['0'], [], ['1']]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        start: int,
        every: int,
        order: FreezingOrder = "lowest_first",
        names: Names | None = None,
    ) -> None:
        check_choice("order", order, get_args(FreezingOrder))
        self.start = check_count("start", start, 0)
        self.every = check_count("every", every, 1)
        layers = list(choose_layers(model, names, _PURPOSE).items())
        self._model = model
        self._layers = dict(layers if order == "lowest_first" else layers[::-1])

    def step(self, step: int) -> list[str]:
        """Freeze the layers that are due; call it before each update.

        Args:
            step: number of the update, ≥ 0; steps may be skipped.

        Returns:
            Names of the layers that this call froze.

        Raises:
            InputError: not a step number; a layer that is due is neither trained nor calibrated.
        """
        step = check_count("step", step, 0)
        if step < self.start:
            return []
        num_due = 1 + (step - self.start) // self.every
        first = list(self._layers.items())[:num_due]
        due = {name: layer for name, layer in first if not layer.is_frozen}
        _freeze(due)
        return list(due)

    def state_dict(self) -> FreezingState:
        """Return which layers are frozen, for a checkpoint: a model's state dict lacks it."""
        return {"frozen": [name for name, layer in self._layers.items() if layer.is_frozen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze exactly the layers of a state; load the model's own state dict first.

        Raises:
            InputError: the state is invalid, belongs to another model, or a layer's statistics are
                not loaded. Nothing has changed then.
        """
        frozen = _names_in(state)
        unknown = [name for name in frozen if name not in self._layers]
        if unknown:
            raise InputError(
                f"the state of StatisticsFreezing names {listed(unknown)}; the model has "
                f"{listed(self._layers)}: load it with the model and names that it was saved with"
            )
        _freeze({name: self._layers[name] for name in frozen})
        others = {name: layer for name, layer in self._layers.items() if name not in frozen}
        _unfreeze(self._model, others)


def _names_in(state: object) -> list[str]:
    """Return the layer names in a state, or raise an InputError."""
    names = state.get("frozen") if isinstance(state, Mapping) else None
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if names is None or not is_list:
        what = "has no entry 'frozen'" if names is None else f"has frozen={names!r}"
        what = what if isinstance(state, Mapping) else f"is {state!r}"
        raise InputError(
            f"the state of StatisticsFreezing {what}, expected what state_dict() gave: "
            "{'frozen': [names of layers]}"
        )
    return list(names)


def _unfreeze(model: nn.Module, layers: Mapping[str, BatchStatisticsNorm]) -> list[str]:
    """Unfreeze the layers that are frozen; each takes the mode of its parent."""
    frozen = {name: layer for name, layer in layers.items() if layer.is_frozen}
    parents = {child: module for module in model.modules() for child in module.children()}
    for layer in frozen.values():
        # Some trainers set `training` without calling `train`, so only the parent has the mode.
        parent = parents.get(layer)
        layer.unfreeze_statistics(None if parent is None else parent.training)
    return list(frozen)


def _freeze(layers: Mapping[str, BatchStatisticsNorm]) -> None:
    """Freeze all of the layers, or none on an error."""
    untrained = [name for name, layer in layers.items() if not int(layer.num_batches_tracked)]
    if untrained:
        raise InputError(
            f"{listed(untrained)}: the running statistics still have their initial "
            "values; run powernorm.calibrate(model, batches) or train first, then freeze"
        )
    for layer in layers.values():
        layer.freeze_statistics()
