"""The norms of a model that are looked at, and what goes into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.finder import FoundNorm, Reading, find_norms
from powernorm.inspection.selection import (
    Selection,
    Site,
    by_default,
    inventory,
    place,
    select,
    stacks,
)
from powernorm.norms import BatchStatisticsNorm, Norm, current_padding_mask
from powernorm.norms.feature_dims import features_last, has_dim
from powernorm.norms.masks import check_padding_mask
from powernorm.norms.observation import arguments_of_call, check_model, short_name
from powernorm.surgery.masking import own_masks

_EPS: Final = 1e-5
"""Of what would take a norm's place, where the norm says nothing of its own."""

_FOREIGN: Final = {"layer": "ln", "rms": "rms", "batch": "bn"}
"""Short names for norms of other libraries, by what they compute."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A norm under observation."""

    site: Site
    reading: Reading
    in_scope: bool
    """Whether `powernorm.swap` would change it by default: the encoder's of an encoder-decoder."""

    @property
    def name(self) -> str:
        """Its first dotted name, as it is without `torch.compile`."""
        parts = self.site.name.split(".")
        return ".".join(part for part in parts if part != "_orig_mod")

    @property
    def module(self) -> nn.Module:
        """The norm, or the wrapper that gives it tokens."""
        return self.site.norm.module

    @property
    def batch_layer(self) -> BatchStatisticsNorm | None:
        """The norm, if it is one of this library's with batch statistics."""
        return self.module if isinstance(self.module, BatchStatisticsNorm) else None

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the norm itself normalises by statistics over tokens."""
        return self.batch_layer is not None or self.reading.kind == "batch"

    @property
    def centered(self) -> bool:
        """Whether what is, or might be put, in its place subtracts a mean."""
        return self.batch_layer is None or self.batch_layer.centered

    @property
    def eps(self) -> float:
        """Inside the root."""
        return self.reading.eps or _EPS

    @property
    def norm(self) -> str:
        """Short name of what it computes."""
        return name_of_norm(self.module, self.reading)

    def normalised(self, x: Tensor) -> Tensor:
        """What batch statistics are taken of: x, behind the GroupScaling of a norm that has one."""
        return x if self.batch_layer is None else self.batch_layer.scaled(x)


def name_of_norm(module: nn.Module, reading: Reading) -> str:
    """Short name of what a norm of any library computes."""
    if isinstance(module, Norm):
        return short_name(module)
    return _FOREIGN.get(reading.kind, type(module).__name__)


def find_subjects(model: nn.Module, where: Selection = None) -> tuple[Subject, ...]:
    """The norms over tokens of a model, in its order.

    Args:
        model: any module; nothing in it is run or changed.
        where: which norms, see `powernorm.swap`; None means all, or, of a model that has norms over
            the last dimension, all of those.

    Raises:
        InputError: there is none, `where` selects none, or the model is on the meta device.
    """
    check_model(model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError(
            f"{type(model).__name__} is on the meta device, where there are no values to look at: "
            "load its weights first"
        )
    found = find_norms(model)
    readable = [norm for norm in found if isinstance(norm.reading, Reading)]
    if not readable:
        raise InputError(_none_found(model, found))
    sites = place(model, readable)
    chosen = {site.name for site in by_default(sites)} if where is None else select(sites, where)
    scope = select(sites, None)
    return tuple(
        Subject(site, site.norm.reading, site.name in scope)
        for site in sites
        if site.name in chosen and site.norm.reading is not None
    )


def _none_found(model: nn.Module, found: Sequence[FoundNorm]) -> str:
    text = f"{type(model).__name__} has no norm over tokens that could be diagnosed: "
    if not found:
        return text + inventory(())
    first = found[0]
    return (
        f"{text}of {len(found)} norms none can be read (first {first.names[0]!r}: {first.reason})"
    )


Receiver = Callable[[Subject, Tensor, Tensor | None], None]
"""Gets what a norm normalises, (…, C), and where that is padding."""


@contextmanager
def observing(
    model: nn.Module, subjects: Sequence[Subject], receive: Receiver, notes: dict[str, None]
) -> Iterator[None]:
    """In the block `receive` gets every input of the norms, before they are called.

    Padding is what the call says (`padding_mask`), the user's scope, or the model's own mask
    argument. Where the model's own mask does not fit a norm's input, all positions count, and
    `notes` says so.
    """

    def look(subject: Subject, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        x, mask = _arguments(subject, module, args, kwargs)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        if x.is_nested:
            raise InputError(
                f"{subject.name} got a nested tensor, whose padding cannot be told: give the model "
                "padded tensors and masks"
            )
        if mask is None:
            mask = _scoped_mask(x, subject, notes)
        if mask is not None:
            check_padding_mask(mask, x)
        receive(subject, x.detach(), mask)

    modules = dict(model.named_modules(remove_duplicate=False))
    foreign = [
        name
        for subject in subjects
        if subject.batch_layer is None
        for name in subject.site.norm.names
        if name in modules and name
    ]
    every = [name for subject in subjects for name in subject.site.norm.names]
    stakes = own_masks(model, foreign, stacks(model, every), observed=True)
    # A hook of `with_kwargs` that gives nothing back leaves the call as it is.
    handles = [
        subject.module.register_forward_pre_hook(partial(look, subject), with_kwargs=True)
        for subject in subjects
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for stake in stakes:
            stake.withdraw()


def _arguments(
    subject: Subject, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Tensor | None]:
    """What goes into a norm, features last, and the mask that the call gives."""
    if isinstance(module, Norm):
        return arguments_of_call(module, args, kwargs)
    x, dim = next(iter((*args, *kwargs.values())), None), subject.reading.feature_dim
    if isinstance(x, Tensor) and not x.is_nested and has_dim(x, dim):
        x = features_last(x, dim)
    return x, None


def _scoped_mask(x: Tensor, subject: Subject, notes: dict[str, None]) -> Tensor | None:
    try:
        # Norms of this library go by what they themselves would get in training.
        return current_padding_mask(
            x, subject.module, observing=not isinstance(subject.module, Norm)
        )
    except InputError:
        notes[
            f"{subject.name}: the model's mask does not fit its input, so that padding counts there"
        ] = None
        return None
