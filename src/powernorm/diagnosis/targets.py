"""Norms of a model under diagnosis, and the observation of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.mask_owners import attach_mask_owners
from powernorm.inspection.modules import name_without_compile
from powernorm.inspection.observer import NormCall, observe
from powernorm.inspection.reading import Reading
from powernorm.inspection.rows import NormRow
from powernorm.inspection.selection import (
    Selection,
    Site,
    inventory,
    place,
    select,
    stacks,
)
from powernorm.norms import BatchStatisticsNorm, Norm
from powernorm.norms.arguments import check_model

_EPS: Final = 1e-5
"""Default eps of a norm that replaces another one without eps."""

_FOREIGN: Final = {"layer": "ln", "rms": "rms", "batch": "bn"}
"""Short names for norms of other libraries, by kind."""


@dataclass(frozen=True, eq=False)
class Target:
    """A norm under diagnosis."""

    site: Site
    reading: Reading
    in_scope: bool
    """Whether `powernorm.swap` would change it by default (in an encoder-decoder the encoder's)."""

    @property
    def name(self) -> str:
        """First dotted name of the norm, without the parts added by `torch.compile`."""
        return name_without_compile(self.site.name)

    @property
    def module(self) -> nn.Module:
        """Module of the norm, or the wrapper that gives it tokens."""
        return self.site.norm.module

    @property
    def batch_layer(self) -> BatchStatisticsNorm | None:
        """Module of the norm, if it is one of this library's with batch statistics."""
        return self.module if isinstance(self.module, BatchStatisticsNorm) else None

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the norm itself normalizes by statistics over tokens."""
        return self.batch_layer is not None or self.reading.kind == "batch"

    @property
    def centered(self) -> bool:
        """Whether it, or a norm that might replace it, subtracts a mean."""
        return self.batch_layer is None or self.batch_layer.centered

    @property
    def eps(self) -> float:
        """Constant added to the variance inside the root."""
        return self.reading.eps or _EPS

    @property
    def norm(self) -> str:
        """Short name of the norm's computation."""
        return name_of_norm(self.site.norm)

    def normalized(self, x: Tensor) -> Tensor:
        """Return the input of batch statistics: x, after the norm's GroupScaling if any."""
        return x if self.batch_layer is None else self.batch_layer.scaled(x)


def name_of_norm(found: FoundNorm) -> str:
    """Return the short name of any library's norm by its computation, as used in files."""
    if isinstance(found.module, Norm):
        return found.kind
    return _FOREIGN.get(found.kind, type(found.module).__name__)


def find_targets(model: nn.Module, where: Selection = None) -> tuple[Target, ...]:
    """Return the norms over tokens of a model, in the order of the model.

    Args:
        model: any module; nothing in it is run or changed.
        where: selection of norms, see `powernorm.swap`; None means all that can be read.

    Raises:
        InputError: there is none, `where` selects none, or the model is on the meta device.
    """
    check_model(model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError(
            f"{type(model).__name__} is on the meta device and has no values: "
            "load its weights first"
        )
    found = find_norms(model)
    readable = [norm for norm in found if isinstance(norm.reading, Reading)]
    if not readable:
        raise InputError(_none_found(model, found))
    sites = place(model, readable)
    chosen = {site.name for site in sites} if where is None else select(sites, where)
    scope = select(sites, None)
    return tuple(
        Target(site, site.norm.reading, site.name in scope)
        for site in sites
        if site.name in chosen and site.norm.reading is not None
    )


def left_out(model: nn.Module, targets: Sequence[Target]) -> tuple[NormRow, ...]:
    """Return a row for each norm of a model that is not under diagnosis, with the reason."""
    known = {target.name for target in targets}
    return tuple(
        NormRow(name=name, kind=norm.kind, action="keep", reason=norm.reason or "not selected")
        for norm in find_norms(model)
        if (name := name_without_compile(norm.names[0])) not in known
    )


def _none_found(model: nn.Module, found: Sequence[FoundNorm]) -> str:
    text = f"{type(model).__name__} has no norm over tokens that could be diagnosed: "
    if not found:
        return text + inventory(())
    first = found[0]
    return (
        f"{text}of {len(found)} norms none can be read (first {first.names[0]!r}: {first.reason})"
    )


@contextmanager
def observing(
    model: nn.Module,
    targets: Sequence[Target],
    receive: Callable[[Target, NormCall], None],
    notes: dict[str, None],
) -> Iterator[None]:
    """Pass every input of the norms to `receive` in the block, before they are called.

    Padding is given by the call (`padding_mask`), by the user's scope, or by the model's own mask
    argument. If the model's own mask does not fit a norm's input, all positions count, and a
    note is added to `notes`.
    """
    by_name = {target.name: target for target in targets}

    def look(call: NormCall) -> None:
        if not call.mask_fits:
            text = f"{call.name}: the model's mask does not fit its input, so that padding counts"
            notes[f"{text} there"] = None
        receive(by_name[call.name], call)

    modules = dict(model.named_modules(remove_duplicate=False))
    foreign = [
        name
        for target in targets
        if target.batch_layer is None
        for name in target.site.norm.names
        if name in modules and name
    ]
    every = [name for target in targets for name in target.site.norm.names]
    uses = attach_mask_owners(model, foreign, stacks(model, every), observed=True)
    dims = {target.name: target.reading.feature_dim for target in targets}
    norms = {target.name: target.module for target in targets}
    try:
        with observe(norms, on_input=look, feature_dims=dims):
            yield
    finally:
        for use in uses:
            use.release()
