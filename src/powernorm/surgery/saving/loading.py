"""Conversion of a model of the original architecture into a saved one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import Norm
from powernorm.norms.stateful import is_optional_key
from powernorm.surgery.changes import Changes, slot_of
from powernorm.surgery.folding.structure import make_tensors, stop_tying
from powernorm.surgery.saving.records import REBUILD, is_pretrained, mark
from powernorm.surgery.saving.storage import (
    SavedModel,
    checksum_of,
    passing_buffers,
    state_with_ties,
    traits_of,
)


def fill_model(model: nn.Module, saved: SavedModel, source: Path, fix: str = REBUILD) -> nn.Module:
    """Turn a model of the original architecture into the saved one, in place.

    Args:
        model: built like the saved one, its norms swapped or not; its weights do not matter.
        saved: the read model.
        source: path for the errors.
        fix: advice if the tensors do not fit the model.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: the model is of another architecture; it is unchanged then.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError(
            f"{type(model).__name__} is on the meta device, where nothing can be loaded: call "
            "model.to_empty(device=…) first"
        )
    changes = saved.record.apply(model, saved.state)
    try:
        make_tensors(model, _new_biases(model, saved.state), changes)
        problem = (
            _mismatch(state_with_ties(model), saved.state)
            or _other_buffer(model, saved)
            or _other_trait(model, saved)
        )
        if problem:
            raise InputError(f"{source} does not fit {type(model).__name__}: {problem}; {fix}")
        _assign(model, saved, changes)
        model.load_state_dict(dict(saved.state))
        mark(model)
    except BaseException:
        changes.undo()
        raise
    return model.eval()


def _new_biases(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the biases that folding has added, which older files do not list."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in sorted(state.keys() - model.state_dict().keys()):
        path, _, attribute = name.rpartition(".")
        slots = modules[path]._parameters if path in modules else {}
        if slots.get(attribute, model) is None:
            yield name


def _mismatch(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    for what, missing in (
        ("it lacks", expected.keys() - given.keys()),
        ("the model lacks", given.keys() - expected.keys()),
    ):
        names = [name for name in missing if not is_optional_key(name)]
        if names:
            return f"{what} {min(names)}"
    for name in filter(given.__contains__, expected):
        tensor = expected[name]
        if tensor.shape != given[name].shape:
            return f"{name} is {tuple(given[name].shape)} there and {tuple(tensor.shape)} here"
    return ""


def _other_buffer(model: nn.Module, saved: SavedModel) -> str:
    floats, others = passing_buffers(model)
    missing = sorted(saved.buffers.keys() - floats.keys())
    if missing:
        return f"the model lacks the buffer {missing[0]}"
    for name, sum_there in saved.sums.items():
        if name not in others or checksum_of(others[name]) != sum_there:
            return f"the buffer {name}, which is computed when it is built, is another one"
    return ""


def _other_trait(model: nn.Module, saved: SavedModel) -> str:
    """Compare modules of torch without tensors; other libraries may rename theirs."""
    modules = dict(model.named_modules(remove_duplicate=False))
    traits = traits_of(model)
    is_own = not is_pretrained(model)
    for name, here in traits.items():
        # The first files lack the traits of layers with submodules.
        is_missed = is_own and not modules[name]._modules
        there = saved.traits.get(name, "nothing" if is_missed else here)
        if there != here and type(modules[name]).__module__.startswith("torch.nn"):
            return f"{name or 'the model'} is {there} there and {here} here"
    gone = next((name for name in saved.traits if is_own and name not in traits), None)
    return "" if gone is None else f"{gone} is {saved.traits[gone]} there and nothing here"


def _assign(model: nn.Module, saved: SavedModel, changes: Changes) -> None:
    """Assign the saved parameters with their types and ties.

    A parameter that fits stays the same object, which an optimizer may hold.
    """
    made: dict[str, nn.Parameter] = {}
    taken: dict[int, str] = {}
    untied = False
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        first = saved.shared.get(name, name)
        value = saved.state[first]
        is_free = taken.setdefault(id(old), first) == first
        untied |= not is_free
        if first not in made:
            fits = is_free and old.dtype == value.dtype
            trains = old.requires_grad and value.is_floating_point()
            made[first] = old if fits else nn.Parameter(value.to(old.device), trains)
        if made[first] is not old:
            changes.set_tensor(*slot_of(model, name), made[first])
    if untied:
        stop_tying(model, changes)
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        stored = saved.buffers[name] if name in saved.buffers else saved.state.get(name)
        module, attribute = slot_of(model, name)
        # Norms of this library keep the type of their statistics themselves.
        if stored is not None and not isinstance(module, Norm):
            changes.set_tensor(module, attribute, stored.to(buffer.device))
