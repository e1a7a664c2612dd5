"""Saved models: tensors in `powernorm.safetensors`, what was changed in `config.json`.

The file of the tensors holds the record too, under its checksum: what stands in `config.json`,
which is text that people edit, has to agree with it. No weights have a name that other libraries
look for, so that a plain `from_pretrained` ends in an error instead of a model with other norms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from powernorm.checksums import check_seal, save_sealed_tensors
from powernorm.errors import InputError
from powernorm.json_reading import parse_json
from powernorm.norms import Norm
from powernorm.norms.buffers import is_optional_key
from powernorm.runs import CONFIG_FILE, MODEL_FILE
from powernorm.surgery.changes import Changes, empty_bias, slot_of
from powernorm.surgery.records import KEY, Record, mark
from powernorm.surgery.structure import stop_tying

_FIX: Final = "save the model again with powernorm.save"
REBUILD: Final = "build the model with the configuration of the one that was saved"
_FOREIGN: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Weights that other libraries would load beside ours."""


@dataclass(frozen=True)
class SavedModel:
    """The contents of a folder.

    Args:
        record: what was changed in the model.
        state: parameters and persistent buffers by name, each name of a shared one.
        buffers: other floating-point buffers, which are computed when a model is built, and may
            have been cast since.
        shared: the first name of each other name of a tensor.
        config: `config.json`.
    """

    record: Record
    state: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def write_model(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model's tensors, and its record into its configuration.

    Args:
        model: as it is.
        folder: made where there is none.
        config: other entries of `config.json`; JSON.

    Raises:
        InputError: the folder holds other weights or cannot be written, the model has what cannot
            be saved, or safetensors is missing.
    """
    record = _record_of(model).to_dict()
    check_folder(folder)
    state, shared = separate_tensors(_state_of(model))
    buffers, _ = separate_tensors(_passing_buffers(model))
    try:
        text = json.dumps({KEY: record, "shared": shared, "buffers": sorted(buffers)})
        page = json.dumps({**config, KEY: record}, indent=2, sort_keys=True) + "\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"config has to be JSON: {error}") from error
    temporary = folder / f".{CONFIG_FILE}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with needed_for_files():
            save_sealed_tensors(state | buffers, folder / MODEL_FILE, {KEY: text, "format": "pt"})
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(folder / CONFIG_FILE)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def read_model(folder: Path) -> SavedModel:
    """Read a folder of `write_model`.

    Raises:
        InputError: a file is missing, damaged or does not belong to the other one.
    """
    file = folder / MODEL_FILE
    if not file.is_file():
        raise InputError(f"{folder} holds no {MODEL_FILE}: give a folder that powernorm.save wrote")
    if check_seal(file, _FIX) == "unsealed":
        raise InputError(f"{file} is damaged, it has lost its checksum: {_FIX}")
    with needed_for_files():
        from safetensors import safe_open
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        described = parse_json(metadata[KEY], str(file), _FIX)
        record = Record.from_dict(described[KEY])
        shared, passing = dict(described["shared"]), set(described["buffers"])
        state = {name: value for name, value in tensors.items() if name not in passing}
        state |= {name: state[first] for name, first in shared.items()}
        buffers = {name: tensors[name] for name in passing}
    except InputError:
        raise
    except Exception as error:  # whatever a damaged file makes the readers raise
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{file} is no model of powernorm ({type(error).__name__}: {reason}): {_FIX}"
        ) from error
    config = read_config(folder)
    if config.get(KEY) != described[KEY]:
        raise InputError(
            f"the key {KEY!r} of {folder / CONFIG_FILE} is not what {file} was written with: they "
            f"are of two models, or it was edited; {_FIX}"
        )
    return SavedModel(record, state, buffers, shared, config)


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json`.

    Raises:
        InputError: it cannot be read or is no object.
    """
    file = folder / CONFIG_FILE
    try:
        # As transformers writes it, which is not quite JSON: there may be an Infinity.
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}): {_FIX}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}): {_FIX}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} holds a {type(found).__name__}, expected an object: {_FIX}")
    return found


def fill_model(model: nn.Module, saved: SavedModel, source: Path, fix: str = REBUILD) -> nn.Module:
    """Turn a model of the original architecture into the saved one, in place.

    Args:
        model: built as the saved one was, its norms swapped or not; its weights do not matter.
        saved: what was read.
        source: for the errors.
        fix: what to do about a model that the tensors do not fit.

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
        _add_biases(model, saved.state, changes)
        problem = _mismatch(model.state_dict(), saved.state) or _missing_buffer(model, saved)
        if problem:
            raise InputError(f"{source} does not fit {type(model).__name__}: {problem}; {fix}")
        _assign(model, saved, changes)
        model.load_state_dict(dict(saved.state))
        mark(model)
    except BaseException:
        changes.undo()
        raise
    return model.eval()


def separate_tensors(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, each once and with memory of its own, and names that share one.

    Returns:
        The tensors by their first names, and the first name of each other name.
    """
    kept: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    memory: set[int] = set()
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            shared[name] = first[key]
            continue
        first.setdefault(key, name)
        whole = tensor.untyped_storage().data_ptr()
        kept[name] = tensor.detach().clone() if whole in memory else tensor.detach()
        kept[name] = kept[name].contiguous()
        memory.add(whole)
    return kept, shared


@contextmanager
def needed_for_files() -> Iterator[None]:
    """In the block, say how to get safetensors where it is missing.

    Raises:
        InputError: it is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise InputError(
            "saved models need the package safetensors: pip install safetensors"
        ) from error


def _record_of(model: nn.Module) -> Record:
    record = Record.of(model)
    if not record.parts:
        raise InputError(
            f"{type(model).__name__} holds no norm of powernorm and none that was folded: save it "
            "as you save any other model"
        )
    if any("" in names for part in record.parts for names in part.names):
        raise InputError(
            f"the model is itself a norm ({type(model).__name__}): save its state_dict()"
        )
    return record


def check_folder(folder: Path) -> None:
    """Raise an InputError where a model cannot go: a file, or a folder with other weights.

    Raises:
        InputError: says what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give the name of a folder")
    foreign = next((name for name in _FOREIGN if (folder / name).exists()), None)
    if foreign is not None:
        raise InputError(
            f"{folder} holds {foreign}, which other libraries would load instead of this model: "
            "give a folder of its own"
        )


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name} of {type(model).__name__} is a {type(value).__name__}, and only tensors "
                "can be saved: use torch.save(model.state_dict(), …)"
            )
        if value.is_meta or type(value) not in (Tensor, nn.Parameter):
            kind = "on the meta device" if value.is_meta else f"a {type(value).__name__}"
            raise InputError(
                f"{name} is {kind}, which has no values here: save a model with ordinary tensors, "
                "such as the whole state that torch.distributed.checkpoint gathers"
            )
    return state


def _passing_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers that are no part of the state dict."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and name in module._non_persistent_buffers_set
        and buffer.is_floating_point()
    }


def _add_biases(model: nn.Module, state: Mapping[str, Tensor], changes: Changes) -> None:
    """Give layers the biases that folding has added."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in state.keys() - model.state_dict().keys():
        path, _, attribute = name.rpartition(".")
        slots = modules[path]._parameters if path in modules else {}
        if slots.get(attribute, model) is None:
            weight = next(modules[path].parameters(recurse=False))
            changes.set_tensor(modules[path], attribute, empty_bias(len(state[name]), weight))


def _mismatch(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    for what, missing in (
        ("it lacks", expected.keys() - given.keys()),
        ("the model lacks", given.keys() - expected.keys()),
    ):
        names = [name for name in missing if not is_optional_key(name)]
        if names:
            return f"{what} {min(names)}"
    for name in expected.keys() & given.keys():
        tensor = expected[name]
        if tensor.shape != given[name].shape:
            return f"{name} is {tuple(given[name].shape)} there and {tuple(tensor.shape)} here"
    return ""


def _missing_buffer(model: nn.Module, saved: SavedModel) -> str:
    known = dict(model.named_buffers(remove_duplicate=False))
    missing = sorted(saved.buffers.keys() - known.keys())
    return f"the model lacks the buffer {missing[0]}" if missing else ""


def _assign(model: nn.Module, saved: SavedModel, changes: Changes) -> None:
    """Give a model the parameters themselves, in their types, tied and untied as they were."""
    made: dict[str, nn.Parameter] = {}
    was_tied: dict[int, str] = {}
    untied = False
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        first = saved.shared.get(name, name)
        if first not in made:
            value = saved.state[first].to(old.device)
            made[first] = nn.Parameter(value, old.requires_grad and value.is_floating_point())
        untied |= was_tied.setdefault(id(old), first) != first
        module, attribute = slot_of(model, name)
        changes.set_tensor(module, attribute, made[first])
    if untied:
        stop_tying(model, changes)
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        stored = saved.buffers[name] if name in saved.buffers else saved.state.get(name)
        module, attribute = slot_of(model, name)
        # A norm of this library keeps the type of its statistics by itself.
        if stored is not None and not isinstance(module, Norm):
            changes.set_tensor(module, attribute, stored.to(buffer.device))
