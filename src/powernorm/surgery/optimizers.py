"""Optimizers that were built before norms of their model changed.

If given to a swap or an insertion, they get the new parameters and keep the state of the others. If
not, their first steps show whether they train the new parameters, and a warning names those that
are missing. `decay_groups` makes parameter groups in which the weight decay of γ depends on the
role of its norm.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from powernorm.errors import InputError
from powernorm.inspection.finder import Slot, find_norms
from powernorm.inspection.selection import Selection, place, select
from powernorm.norms import Norm
from powernorm.norms.arguments import check_model, check_number

Optimizers = Optimizer | Sequence[Optimizer] | None
"""Optimizers of a model, given to a swap or an insertion."""

_NAMES: Final = "param_names"
_SHOWN: Final = 4


@dataclass(frozen=True, eq=False)
class NewNorm:
    """A norm that is put in its place in a model, and the one that it replaces.

    Args:
        norm: the new norm.
        names: its dotted names.
        module: module that is put into the slots: the norm, perhaps with a gate.
        slots: slots that get the module.
        places: names of the modules that it replaces, or that get it.
        around: modules around the norm, the nearest first.
        old: the replaced norm; None for an insertion.
        pairs: old and new parameters with the same meaning.
        behind: the linear map that calls it by a hook, if it replaces nothing.
    """

    norm: Norm
    names: tuple[str, ...]
    module: nn.Module
    slots: tuple[Slot, ...]
    places: tuple[str, ...]
    around: Sequence[nn.Module]
    old: nn.Module | None = None
    pairs: Sequence[tuple[Tensor | None, Tensor | None]] = ()
    behind: nn.Module | None = None

    @property
    def old_parameters(self) -> list[nn.Parameter]:
        """Parameters of the old norm."""
        return [] if self.old is None else list(self.old.parameters())

    @property
    def new_parameters(self) -> list[nn.Parameter]:
        """Parameters of the new norm that the old one does not have."""
        known = {id(p) for p in self.old_parameters}
        return [p for p in self.norm.parameters() if id(p) not in known]

    def near(self) -> list[nn.Parameter]:
        """Return parameters whose group new ones may join: the first that is in one decides."""
        # Matrices may have a separate optimizer, such as Muon, that takes no vectors.
        around = [p for one in self.around for p in one.parameters()]
        return self.old_parameters or sorted(around, key=lambda p: p.ndim)


def checked_optimizers(optimizers: Optimizers, model: nn.Module) -> tuple[Optimizer, ...] | None:
    """Return optimizers as a tuple, None if none was given.

    Raises:
        InputError: one of them is not an optimizer, or has no parameter of the model.
    """
    if optimizers is None:
        return None
    given = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    for one in given:
        if not isinstance(one, Optimizer):
            raise InputError(
                f"optimizer is or holds a {type(one).__name__}, expected a torch.optim.Optimizer "
                "or a sequence of them"
            )
        if not _ids(one) & {id(p) for p in model.parameters()}:
            raise InputError(
                f"optimizer={type(one).__name__} has no parameter of {type(model).__name__}: give "
                "the one that trains this model"
            )
    return given


def follow_norms(
    model: nn.Module,
    norms: Sequence[NewNorm],
    optimizers: Sequence[Optimizer] | None,
    verb: str,
) -> Callable[[], None]:
    """Give new parameters to the optimizers, or, without any, check whether one has them.

    Returns:
        A function that undoes it.
    """
    if optimizers is None:
        new = [p for one in norms for p in one.new_parameters]
        return _UntrainedWatch(model, new, verb).remove if new else lambda: None
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [_Group(one, group, names) for one in optimizers for group in one.param_groups]
    for one in norms:
        _follow(one, groups, names.keys())

    def put_back() -> None:
        for group in groups:
            group.put_back()

    return put_back


def _follow(change: NewNorm, groups: Sequence[_Group], present: Iterable[int]) -> None:
    home = next((group for p in change.near() for group in groups if p in group), None)
    new = {id(p): p for p in change.new_parameters}
    partners = {id(old): new.get(id(one)) for old, one in change.pairs}
    for old in change.old_parameters:
        if id(old) not in present:  # it stays, or is tied to another one
            for group in groups:
                if old in group:
                    partner = partners.get(id(old))
                    group.exchange(old, partner)
                    new.pop(id(partner), None)
    # If no optimizer has the old parameters, they are deliberately not trained.
    untrained = {id(one) for old, one in change.pairs if old is not None}
    for key, parameter in new.items():
        if home is not None and key not in untrained and parameter.requires_grad:
            home.add(parameter)


class _Group:
    """One group of an optimizer, and its former state."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], names: dict[int, str]) -> None:
        self.state, self.group, self.names = optimizer.state, group, names
        self.before = {key: list(group[key]) for key in ("params", _NAMES) if key in group}
        self.exchanged: list[tuple[nn.Parameter | None, nn.Parameter | None, Any]] = []

    def __contains__(self, parameter: Tensor) -> bool:
        return any(one is parameter for one in self.group["params"])

    def add(self, new: nn.Parameter) -> None:
        self._write(len(self.group["params"]), 0, [new])
        self.exchanged.append((None, new, None))

    def exchange(self, old: nn.Parameter, new: nn.Parameter | None) -> None:
        """Replace a parameter; its state moves to one of the same shape, type and device."""
        index = next(i for i, one in enumerate(self.group["params"]) if one is old)
        self._write(index, 1, [] if new is None else [new])
        state = self.state.pop(old, None)
        self.exchanged.append((old, new, state))
        if new is not None and state is not None and fits(old, new):
            self.state[new] = state

    def _write(self, index: int, count: int, new: Sequence[nn.Parameter]) -> None:
        self.group["params"][index : index + count] = new
        if _NAMES in self.group:
            self.group[_NAMES][index : index + count] = [self.names[id(one)] for one in new]

    def put_back(self) -> None:
        """Restore the old parameters, with the state that was learned since."""
        for key, values in self.before.items():
            self.group[key][:] = values
        for old, new, state in self.exchanged:
            since = None if new is None else self.state.pop(new, None)
            if old is None:
                continue
            if new is not None and since is not None and fits(old, new):
                state = since
            if state is not None:
                self.state[old] = state


def fits(old: Tensor, new: Tensor) -> bool:
    """Return whether two tensors have the same shape, type and device."""
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


class _UntrainedWatch:
    """A hook on the next steps of all optimizers, which warns if none has the new parameters.

    A model may have several optimizers: the warning waits until those that have stepped have all
    of its other parameters, or until one steps for the second time. An optimizer without any
    parameter of the model is ignored. The model is not kept alive.
    """

    def __init__(self, model: nn.Module, new: Iterable[nn.Parameter], verb: str) -> None:
        self.verb = verb
        self._handle = handle = register_optimizer_step_pre_hook(self.look)
        self._model = weakref.ref(model, lambda _: handle.remove())
        self._new = [weakref.ref(one) for one in new]
        self._foreign: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._covered: set[int] = set()
        self._is_done = False

    def look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check which parameters an optimizer trains; runs before its step."""
        del args, kwargs
        if torch.compiler.is_compiling() or self._is_done or optimizer in self._foreign:
            return
        model = self._model()
        named = {} if model is None else {id(p): (name, p) for name, p in model.named_parameters()}
        trained = named.keys() & _ids(optimizer)
        if not trained:
            self._foreign.add(optimizer)
            return
        self._covered |= trained
        learning = {key for key, (_, p) in named.items() if p.requires_grad}
        new = {id(one()) for one in self._new} & learning
        missing = new - self._covered
        may_wait = learning - new - self._covered and optimizer not in self._stepped
        self._stepped.add(optimizer)
        if missing and may_wait:
            return
        if missing:
            names = [name for key, (name, _) in named.items() if key in missing]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            warnings.warn(
                f"{type(optimizer).__name__} steps without parameters that {self.verb} has added: "
                f"{', '.join(names[:_SHOWN])}{more}. They keep their initial values: build the "
                f"optimizer after {self.verb}, or pass it to {self.verb} as optimizer=",
                stacklevel=3,
            )
        self._end(named[max(trained)][1])

    def remove(self) -> None:
        """Remove the hook."""
        self._is_done = True
        self._handle.remove()

    def _end(self, parameter: nn.Parameter) -> None:
        """Remove the hook in the next backward, as torch is iterating over its table now."""
        self._is_done = True

        def remove(_: Tensor) -> None:
            self._handle.remove()
            own.remove()

        if parameter.requires_grad:
            own = parameter.register_post_accumulate_grad_hook(remove)


def decay_groups(
    model: nn.Module, weight_decay: float, norms: Selection = ()
) -> list[dict[str, Any]]:
    """Return two parameter groups for an optimizer: decayed parameters, and the others.

    Matrices are decayed; biases and the parameters of norms are not, except γ of the selected
    norms. A γ in front of a linear map (pre-norm) could be part of it, and decay keeps both in
    balance; a γ whose output goes into the residual stream scales its branch, and decay would
    shrink it (Wang et al. 2026, arXiv:2605.26895, who decay the former only).

    Args:
        model: its parameters with `requires_grad` are grouped.
        weight_decay: weight decay of the first group.
        norms: norms whose γ is decayed, as in `powernorm.swap`; `()` for none.

    Raises:
        InputError: a selection without a norm.

    >>> from powernorm import Where
    >>> model = nn.TransformerEncoderLayer(8, 2, norm_first=True)
    >>> roles = Where(roles=("attention", "feed-forward"))
    >>> [len(group["params"]) for group in decay_groups(model, 0.1, roles)]
    [6, 6]
    """
    check_model(model)
    decay = check_number("weight_decay", weight_decay, at_least=0)
    found = place(model, find_norms(model))
    chosen = frozenset[str]() if norms == () else select(found, norms)
    owned = {
        id(parameter): site.name in chosen and name == "weight"
        for site in found
        for name, parameter in site.norm.module.named_parameters()
    }
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for parameter in model.parameters():
        if parameter.requires_grad:
            decayed = owned.get(id(parameter), parameter.ndim > 1)
            groups[not decayed]["params"].append(parameter)
    return groups
