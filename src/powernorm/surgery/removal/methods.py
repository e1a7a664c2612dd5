"""Methods that remove LayerNorm and RMSNorm from a model while it is trained.

| method | replacement of a norm |
|---|---|
| `match` | an affine map per feature, fitted to the norm's outputs by least squares |
| `match-centered` | the same after LayerNorm's centering of each token |
| `freeze` | the norm with a constant in place of its deviation, all norms at once |
| `freeze-in-turn` | the same, one norm after the other |
| `taper` | the norm, whose gate closes in favor of a constant scale (TaperNorm) |
| `prepbn` | the norm, which fades in favor of BatchNorm plus the identity (PRepBN) |

Each ends in static norms, which `powernorm.fold` folds into the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, Progress
from powernorm.inspection.finder import find_norms
from powernorm.inspection.modules import listed
from powernorm.inspection.observer import observe
from powernorm.inspection.rows import NormRow
from powernorm.inspection.selection import Site, place
from powernorm.norms import ProgressiveRepBatchNorm, TaperNorm
from powernorm.norms.preserved_state import preserved_state
from powernorm.surgery.calibration import calibrate
from powernorm.surgery.freezing import freeze_statistics
from powernorm.surgery.matching import match_teacher
from powernorm.surgery.removal.layers import (
    CenteredBatchNorm,
    FrozenDeviationNorm,
    mean_deviations,
)
from powernorm.surgery.removal.schedules import removal_steps
from powernorm.surgery.swapping import swap

MethodName = Literal["match", "match-centered", "freeze", "freeze-in-turn", "taper", "prepbn"]
"""Names of the methods."""

_CENTERS: Final = {"layer": True, "ln": True, "ln-simple": True, "detach": True, "rms": False}
"""Kinds of norms that can be removed, and whether they center."""


@dataclass(frozen=True, kw_only=True)
class RemovalRow(NormRow):
    """Removal of one norm.

    Attributes:
        role: part of the model that it belongs to.
        step: number of updates before it is removed.
        explained: fraction of the variance of its outputs that its replacement explains, when
            it was fitted.
        deviation: the constant that it divides by.
    """

    role: str
    step: int = 0
    explained: float | None = None
    deviation: float | None = None


def removable_norms(model: nn.Module) -> tuple[Site, ...]:
    """Return the norms of a model, all of which can be removed.

    Raises:
        InputError: the model has none, or one that is not a LayerNorm or RMSNorm of a stream of
            tokens.
    """
    found = place(model, find_norms(model))
    if not found:
        raise InputError(f"{type(model).__name__} has no norms: there is nothing to remove")
    for site in found:
        reading = site.norm.reading
        if reading is None:
            raise InputError(
                f"{site.name} ({site.type_name}) cannot be removed: {site.norm.reason}"
            )
        if site.norm.kind not in _CENTERS:
            raise InputError(
                f"{site.name} is a {site.type_name}, and only LayerNorm and RMSNorm can be "
                "removed: a norm of batch statistics folds without that, see powernorm.fold"
            )
    return found


class Removal(ABC):
    """The removal of all norms of a model during a training; see `build_removal`.

    Call `install`, then `fit` (or, to resume from a checkpoint, load the model's state and the
    removal's), then `step` before each update, and `finish` after the last, in evaluation mode.

    Args:
        name: the method.
        model: a copy of the original, changed in place.
        num_steps: number of updates of the training.
        momentum: weight of the new batch in the averages of `freeze-in-turn`, `taper` and `prepbn`.
        accumulation: batches per update.
    """

    def __init__(
        self,
        name: MethodName,
        model: nn.Module,
        num_steps: int,
        momentum: float,
        accumulation: int,
    ) -> None:
        self.name = name
        self.model = model
        self.sites = {site.name: site for site in removable_norms(model)}
        self.num_steps = num_steps
        self.momentum = momentum
        self.accumulation = accumulation
        self.rows: tuple[RemovalRow, ...] = ()
        """Result for each norm, once it is fitted."""
        self.due = self._schedule()
        """Number of updates before each norm is removed."""

    def _schedule(self) -> Mapping[str, int]:
        """Return when each norm is removed, or raise an InputError if the method does not fit."""
        return dict.fromkeys(self.sites, 0)

    @abstractmethod
    def install(self) -> None:
        """Put the layers in place of the norms."""

    def fit(
        self,
        teacher: nn.Module,
        batches: Sequence[Any],
        forward: Forward,
        on_progress: Progress | None = None,
    ) -> None:
        """Fit the layers to the original on batches, before the training, if the method does.

        Args:
            teacher: the original model, in evaluation mode.
            batches: batches of the training.
            forward: runs a model on a batch.
            on_progress: called with (passes done, passes in all).

        Raises:
            InputError: a norm does not run on the batches.
        """
        del teacher
        order = call_order(self.model, self.sites, batches[0], forward)
        self._set_rows({name: {} for name in order}, on_progress)

    @abstractmethod
    def settle(self) -> None:
        """Make all layers static from now on, as they are at the end."""

    def finish(self, batches: Sequence[Any], forward: Forward) -> None:
        """Make all layers static, and measure the statistics that this needs.

        Args:
            batches: batches of the training.
            forward: runs a model on a batch.
        """
        del batches, forward
        self.settle()

    def step(self, step: int) -> list[str]:
        """Remove the norms that are due before an update.

        Args:
            step: number of updates so far.

        Returns:
            Names of the norms that are removed now.
        """
        del step
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs besides the model's."""
        return {"rows": [row.to_dict() for row in self.rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`; load the model's own state before."""
        rows = tuple(RemovalRow(**{**row, "into": ()}) for row in state["rows"])
        for row in rows:
            texts = (row.name, row.kind, row.role)
            numbers = (row.step, row.explained, row.deviation)
            if not all(isinstance(value, str) for value in texts) or not all(
                isinstance(value, int | float | None) for value in numbers
            ):
                raise TypeError(f"{row} has a value of another type")
        self.rows = rows

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers that replace the norms, by name."""
        return {name: self.model.get_submodule(name) for name in self.sites}

    def _swap_each(self, to: str, options: Callable[[bool, float], Mapping[str, Any]]) -> None:
        """Put a layer in each norm's place, with options by whether that centers and its eps."""
        for name, site in self.sites.items():
            reading = site.norm.reading
            assert reading is not None
            swap(
                self.model,
                to,
                where=lambda one, _, own=name: one == own,  # type: ignore[misc]
                **options(_CENTERS[site.norm.kind], reading.eps or 1e-5),
            )

    def _set_rows(
        self, fitted: Mapping[str, Mapping[str, Any]], on_progress: Progress | None = None
    ) -> None:
        """Set the rows of the norms, in this order, with the values that were fitted."""
        self.rows = tuple(
            RemovalRow(
                name=name,
                kind=self.sites[name].norm.kind,
                action="remove",
                role=self.sites[name].role,
                step=self.due[name],
                **values,
            )
            for name, values in fitted.items()
        )
        if on_progress is not None:
            on_progress(1, 1)


class _Matching(Removal):
    """Affine maps fitted to the norms' outputs, with fixed statistics.

    `match-centered` fits them after the centering of each token.
    """

    def _schedule(self) -> Mapping[str, int]:
        if self.name == "match-centered":
            for name, site in self.sites.items():
                if not _CENTERS[site.norm.kind]:
                    raise InputError(
                        f"{name} is a {site.type_name}, which does not center: method.name=match"
                    )
        return super()._schedule()

    def install(self) -> None:
        """Put BatchNorms in place of the norms."""
        to = _path(CenteredBatchNorm) if self.name == "match-centered" else "bn"
        swap(self.model, to, where=lambda name, _: name in self.sites)

    def fit(
        self,
        teacher: nn.Module,
        batches: Sequence[Any],
        forward: Forward,
        on_progress: Progress | None = None,
    ) -> None:
        """Fit the maps one after the other, in the order of the calls."""
        report = match_teacher(
            self.model, teacher, batches, forward, names=list(self.sites), on_progress=on_progress
        )
        self._set_rows({row.name: {"explained": row.explained} for row in report.rows})
        self.settle()

    def settle(self) -> None:
        """Keep the statistics fixed, in training too."""
        freeze_statistics(self.model, list(self.sites))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`; load the model's own state before."""
        super().load_state_dict(state)
        self.settle()


class _DeviationFreezing(Removal):
    """Norms whose deviation becomes a constant (FakeLN).

    `freeze-in-turn` follows the published schedule; `freeze` makes all constants before the first
    update, with measured values.
    """

    def _schedule(self) -> Mapping[str, int]:
        if self.name == "freeze":
            return super()._schedule()
        return removal_steps([*self.sites.values()], self.num_steps)

    def install(self) -> None:
        """Replace the norms by layers with their weights, which still normalize."""
        self._swap_each(
            _path(FrozenDeviationNorm),
            lambda centers, eps: {"center": centers, "eps": eps, "momentum": self.momentum},
        )

    def fit(
        self,
        teacher: nn.Module,
        batches: Sequence[Any],
        forward: Forward,
        on_progress: Progress | None = None,
    ) -> None:
        """Measure the mean deviation of each norm's tokens on the original's own inputs."""
        del teacher
        layers = self._frozen_layers()
        measured = mean_deviations(self.model, layers, batches, forward)
        for name, deviation in measured.items():
            layers[name].deviation.fill_(deviation)
            layers[name].running_deviation.fill_(deviation)
        self._set_rows({name: {"deviation": one} for name, one in measured.items()}, on_progress)

    def settle(self) -> None:
        """Let every norm divide by its constant."""
        for layer in self._frozen_layers().values():
            layer.freeze()

    def step(self, step: int) -> list[str]:
        """Freeze the norms that are due."""
        layers = self._frozen_layers()
        due = [name for name, first in self.due.items() if first <= step]
        new = [name for name in due if not layers[name].is_frozen]
        for name in new:
            layers[name].freeze()
        return new

    def state_dict(self) -> dict[str, Any]:
        """Return which norms are constants, and the rows."""
        frozen = [name for name, layer in self._frozen_layers().items() if layer.is_frozen]
        return {**super().state_dict(), "frozen": frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`; load the model's own state before."""
        super().load_state_dict(state)
        layers = self._frozen_layers()
        for name in state["frozen"]:
            layers[name].freeze()

    def _frozen_layers(self) -> dict[str, FrozenDeviationNorm]:
        return cast(dict[str, FrozenDeviationNorm], self.layers)


_TAPER_START: Final = 25 / 300
_TAPER_END: Final = 100 / 300


class _Tapering(Removal):
    """Norms that taper off to a constant scale together, the final norm among them (TaperNorm).

    The published schedule for GPT-2 small, from step 25 to 100 of 300, scaled to the training. The
    paper keeps the final norm, or anchors its scale; here it is removed as well, so that no norm is
    left.
    """

    def _schedule(self) -> Mapping[str, int]:
        start = max(1, round(_TAPER_START * self.num_steps))
        self._end = max(start + 1, round(_TAPER_END * self.num_steps))
        if self._end >= self.num_steps:
            raise InputError(
                f"{self.num_steps} updates are too few to taper in: give 4 or more, best hundreds"
            )
        return dict.fromkeys(self.sites, start)

    def install(self) -> None:
        """Replace the norms by layers with their weights, which still normalize."""
        self._swap_each(
            "taper",
            lambda centers, eps: {
                "kind": "ln" if centers else "rms",
                "eps": eps,
                "start_step": next(iter(self.due.values())),
                "end_step": self._end,
                "momentum": self.momentum,
                "accumulation": self.accumulation,
            },
        )

    @torch.no_grad()
    def settle(self) -> None:
        """Close the gates that are still open."""
        for layer in cast(dict[str, TaperNorm], self.layers).values():
            layer.num_batches_tracked.clamp_(min=self._end * self.accumulation)
            if not float(layer.branch_scale):
                layer.branch_scale.fill_(1.0)
                layer.start_weight.copy_(layer.weight)
            layer.follow_counter()


_FADING_END: Final = 0.8
"""Share of the updates: large in the paper, but before the end."""


class _Fading(Removal):
    """Norms that fade, step by step, in favor of BatchNorm plus the identity (PRepBN).

    `y = λ Norm(x) + (1 - λ)(BN(x) + η x)`, λ from 1 to 0 in the first 0.8 of the updates, and by
    the batches' statistics for the rest. At the end the statistics are measured again, as the
    authors do. η begins at 0, as in their language model. Its γ of 0 would remove the features of a
    trained model, so γ and β of BN start as the norm's.
    """

    def _schedule(self) -> Mapping[str, int]:
        self._end = max(1, round(_FADING_END * self.num_steps))
        return dict.fromkeys(self.sites, self._end)

    def install(self) -> None:
        """Replace the norms by layers that compute the same in the first step."""
        self._swap_each(
            "prepbn",
            lambda centers, eps: {
                "kind": "ln" if centers else "rms",
                "branch_eps": eps,
                "decay_steps": self._end,
                "momentum": self.momentum,
                "accumulation": self.accumulation,
                "start": "torch",  # as in the stored results
                # So that a validation uses the trained mixture.
                "evaluation": "blend",
                "eta": 0.0,
            },
        )

    @torch.no_grad()
    def settle(self) -> None:
        """Let only BatchNorm plus the identity remain."""
        for layer in cast(dict[str, ProgressiveRepBatchNorm], self.layers).values():
            layer.num_batches_tracked.clamp_(min=self._end * self.accumulation)
            layer.follow_counter()

    def finish(self, batches: Sequence[Any], forward: Forward) -> None:
        """Let only BatchNorm plus the identity remain, and measure its statistics."""
        self.settle()
        calibrate(self.model, batches, forward, names=list(self.sites))


_METHODS: Final[Mapping[MethodName, type[Removal]]] = {
    "match": _Matching,
    "match-centered": _Matching,
    "freeze": _DeviationFreezing,
    "freeze-in-turn": _DeviationFreezing,
    "taper": _Tapering,
    "prepbn": _Fading,
}


def build_removal(
    name: MethodName,
    model: nn.Module,
    num_steps: int,
    *,
    momentum: float = 0.1,
    accumulation: int = 1,
) -> Removal:
    """Return the removal with a method's name.

    Args:
        name: name of the method.
        model: a copy of the original.
        num_steps: number of updates of the training.
        momentum: momentum of `freeze-in-turn`, `taper` and `prepbn`.
        accumulation: batches per update.

    Raises:
        InputError: the model has no norms, norms other than LayerNorm and RMSNorm, or norms that
            do not fit the method; or the training is too short for it.
    """
    return _METHODS[name](name, model, num_steps, momentum, accumulation)


def call_order(
    model: nn.Module, names: Iterable[str], batch: Any, forward: Forward
) -> tuple[str, ...]:
    """Return the names of norms in the order of their first calls on a batch.

    Raises:
        InputError: the model does not call one of them.
    """
    called: dict[str, None] = {}
    norms = {name: model.get_submodule(name) for name in names}
    with (
        preserved_state(model, ()),
        observe(norms, on_input=lambda call: called.setdefault(call.name)),
    ):
        forward(model, batch)
    missing = [name for name in norms if name not in called]
    if missing:
        raise InputError(
            f"the model does not use {listed(missing)} on the first batch: norms that do not run "
            "cannot be removed"
        )
    return tuple(called)


def _path(layer: type[nn.Module]) -> str:
    """Return the name by which `swap` builds a layer that has no short name."""
    return f"{layer.__module__}:{layer.__qualname__}"
