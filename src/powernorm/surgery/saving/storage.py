"""Saved models: tensors in `powernorm.safetensors`, the record of changes in `config.json`.

The file of the tensors holds the record too, under its checksum: the text in `config.json`, which
people can edit, has to agree with it. No weights have a name that other libraries look for, so that
a plain `from_pretrained` ends in an error instead of a model with other norms.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.checksums import check_seal, save_sealed_tensors
from powernorm.errors import InputError
from powernorm.files import replacing
from powernorm.json_reading import parse_json, read_json
from powernorm.norms import Norm
from powernorm.records import CONFIG_FILE, MODEL_FILE
from powernorm.surgery.folding.structure import FeatureAffine, FoldedNorm
from powernorm.surgery.saving.records import KEY, ModelRecord

_ZEROS: Final = re.compile(r"(?<=\d)\.0\b")
"""Difference between 0.0 and 0, which a configuration shows before and after JSON."""
_FIX: Final = "save the model again with powernorm.save"
_FOREIGN: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Weights that other libraries would load instead of ours."""


_FAST_PATH: Final = (
    "activation_relu_or_gelu",
    "enable_nested_tensor",
    "mask_check",
    "use_nested_tensor",
)
"""Entries that choose between equivalent computations; a swap changes them."""
_TAKEN: Final = (CONFIG_FILE, "comparison.json", "results.json")
"""Files of a run, a comparison or another model."""


@dataclass(frozen=True)
class SavedModel:
    """The contents of a folder.

    Args:
        record: changes of the model.
        state: parameters and persistent buffers by name, each name of a shared one.
        buffers: other floating-point buffers, which are computed when a model is built, and may
            have been cast since.
        shared: the first name of each other name of a tensor.
        sums: checksums of the other buffers that are not in a state dict, by name.
        traits: classes and settings of modules without submodules, by name.
        config: contents of `config.json`.
        more: other written values, as JSON.
    """

    record: ModelRecord
    state: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)
    traits: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def write_model(
    model: nn.Module, folder: Path, config: Mapping[str, Any], more: Mapping[str, Any]
) -> None:
    """Write a model's tensors, and its record into its configuration.

    Args:
        model: any model.
        folder: created if missing.
        config: other entries of `config.json`, as JSON.
        more: values to keep with the tensors, as JSON.

    Raises:
        InputError: the folder holds other weights or cannot be written, or the model cannot be
            saved.
    """
    record = _record_of(model).to_dict()
    check_target(folder)
    state = _state_of(model)
    _check_overlaps(model)
    floats, others = passing_buffers(model)
    tensors, shared = separate_tensors({**state, **floats})
    described = {
        KEY: record,
        "shared": shared,
        "buffers": sorted(floats),
        "sums": {name: checksum_of(tensor) for name, tensor in others.items()},
        "traits": traits_of(model),
        "more": dict(more),
    }
    try:
        page = json.dumps({**config, KEY: record}, indent=2, sort_keys=True) + "\n"
        # A string, as the configurations of transformers are not quite JSON.
        text = json.dumps({**described, "config": page})
    except (TypeError, ValueError) as error:
        raise InputError(f"config has to be JSON: {error}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / CONFIG_FILE) as file:
            # First, so that a full disk leaves the folder unchanged.
            file.write(page.encode())
            file.flush()
            save_sealed_tensors(tensors, folder / MODEL_FILE, {KEY: text, "format": "pt"})
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{type(model).__name__} has a tensor that safetensors cannot hold "
            f"({type(error).__name__}: {error}): use torch.save(model.state_dict(), …)"
        ) from error


def read_model(folder: Path) -> SavedModel:
    """Read a folder of `write_model`.

    Raises:
        InputError: a file is missing, damaged or does not belong to the other one.
    """
    file = folder / MODEL_FILE
    if not file.is_file():
        raise InputError(f"{folder} holds no {MODEL_FILE}: give a folder that powernorm.save wrote")
    check_folder(folder)
    if check_seal(file, _FIX) == "unsealed":
        raise InputError(f"{file} is damaged, it has lost its checksum: {_FIX}")
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            # Copied, because they would otherwise be the mapped file, which others may write to,
            # and have an alignment with which some kernels round differently.
            tensors = {
                name: opened.get_tensor(name).clone()
                for name in opened.keys()  # noqa: SIM118
            }
        described = parse_json(metadata[KEY], str(file), _FIX)
        record = ModelRecord.from_dict(described[KEY])
        shared = {str(name): str(first) for name, first in described["shared"].items()}
        tensors |= {name: tensors[first] for name, first in shared.items()}
        buffers = {name: tensors.pop(name) for name in described["buffers"]}
        sums, traits = dict(described["sums"]), dict(described["traits"])
        config, more = json.loads(described["config"]), dict(described["more"])
    except InputError:
        raise
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{file} is no model of powernorm ({type(error).__name__}: {reason}): {_FIX}"
        ) from error
    _check_config(read_config(folder), config, folder)
    return SavedModel(record, tensors, buffers, shared, sums, traits, config, more)


def _check_config(found: Mapping[str, Any], written: Mapping[str, Any], folder: Path) -> None:
    key = first_difference(found, written)
    if key is not None:
        raise InputError(
            f"{folder / CONFIG_FILE} is not what {folder / MODEL_FILE} was written with, the key "
            f"{key!r} differs: it was edited, or they are of two models; {_FIX}"
        )


def first_difference(found: Mapping[str, Any], written: Mapping[str, Any]) -> str | None:
    """Return the first key under which two configurations differ, None if they are equal."""
    for key in sorted({*found, *written}):
        # As text, so that NaN equals itself.
        texts = [json.dumps(config.get(key), sort_keys=True) for config in (found, written)]
        if texts[0] != texts[1] or (key in found) != (key in written):
            return key
    return None


def read_config(folder: Path, fix: str = _FIX) -> dict[str, Any]:
    """Return `config.json`, in which transformers may have written an Infinity.

    Args:
        folder: folder of the file.
        fix: advice about an unusable file.

    Raises:
        InputError: the file cannot be read, or holds no object.
    """
    file = folder / CONFIG_FILE
    found = read_json(file, fix, infinite=True)
    if not isinstance(found, dict):
        raise InputError(f"{file} holds a {type(found).__name__}, expected an object: {fix}")
    return found


def separate_tensors(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, each once and in separate memory, and names that share one.

    Returns:
        The tensors by their first names, and the first name of each other name.
    """
    kept: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    memory: set[int] = set()
    for name, given in state.items():
        tensor = given.resolve_conj().resolve_neg()
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


def _record_of(model: nn.Module) -> ModelRecord:
    record = ModelRecord.of(model)
    if record.is_empty:
        raise InputError(
            f"{type(model).__name__} holds no norm of powernorm and none that was folded: save it "
            "as you save any other model"
        )
    if "" in record.names():
        raise InputError(
            f"the model is itself a norm ({type(model).__name__}): save its state_dict()"
        )
    return record


def check_folder(folder: Path) -> None:
    """Raise an InputError if a model cannot be saved here: a file, or a folder with other weights.

    Raises:
        InputError: names the existing file.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give the name of a folder")
    foreign = next((name for name in _FOREIGN if (folder / name).exists()), None)
    if foreign is not None:
        raise InputError(
            f"{folder} holds {foreign}, which other libraries would load instead of this model: "
            "give a folder of its own"
        )


def check_target(folder: Path) -> None:
    """Raise an InputError where a model cannot be written, such as into the folder of a run.

    Raises:
        InputError: names the existing file.
    """
    check_folder(folder)
    if (folder / MODEL_FILE).exists():
        return  # an older model, which is replaced
    taken = next((name for name in _TAKEN if (folder / name).exists()), None)
    if taken is not None:
        raise InputError(
            f"{folder} holds something else ({taken}), which the model's files would replace or "
            "hide: give a folder of its own"
        )


def state_with_ties(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with all names of its parameters; `modularize` hides second ones."""
    state = model.state_dict()
    named = dict(model.named_parameters(remove_duplicate=False))
    known = {id(named[name]) for name in state.keys() & named.keys()}
    hidden = {name: one for name, one in named.items() if name not in state and id(one) in known}
    return {**state, **{name: one.detach() for name, one in hidden.items()}}


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    state = state_with_ties(model)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name} of {type(model).__name__} is a {type(value).__name__}, and only tensors "
                "can be saved: use torch.save(model.state_dict(), …)"
            )
        kind = _unusual(value)
        if kind:
            raise InputError(
                f"{name} is {kind}: save a model with ordinary tensors, such as the whole state "
                "that torch.distributed.checkpoint gathers"
            )
        if name == "__metadata__":
            raise InputError("a tensor named '__metadata__' has no place in safetensors: rename it")
    return state


def _check_overlaps(model: nn.Module) -> None:
    """Raise an InputError if parameters share memory as different views.

    In a loaded model one would not see the updates of the other.
    """
    known: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        for other, seen in known.setdefault(parameter.untyped_storage().data_ptr(), []):
            layouts = [(one.shape, one.stride(), one.storage_offset()) for one in (parameter, seen)]
            (start, stop), (other_start, other_stop) = _extent(parameter), _extent(seen)
            overlap = start < other_stop and other_start < stop
            if layouts[0] != layouts[1] and overlap:
                raise InputError(
                    f"{name} and {other} are different views of the same memory, which does not "
                    "come back: make one of them a computation of the other"
                )
        known[parameter.untyped_storage().data_ptr()].append((name, parameter))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first and the last position of a tensor in its memory, in bytes."""
    start, width = int(tensor.storage_offset()), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * int(stride) for size, stride in steps) if tensor.numel() else 0
    return start * width, (start + reach) * width


def _unusual(value: Tensor) -> str:
    """Return why a tensor is special and cannot be saved, or ""."""
    if value.is_meta:
        return "on the meta device, without values"
    if type(value) not in (Tensor, nn.Parameter):
        return f"a {type(value).__name__}"
    if value.is_quantized:
        return "quantized"
    return "" if value.layout == torch.strided and not value.is_nested else "sparse or nested"


def passing_buffers(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the buffers that are not in the state dict: floating-point ones, and others.

    Those of this library's norms are left out, because the norms set them themselves.
    """
    found = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, Norm)
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }
    floats = {name: buffer for name, buffer in found.items() if buffer.is_floating_point()}
    return floats, {name: buffer for name, buffer in found.items() if name not in floats}


def checksum_of(tensor: Tensor) -> str:
    """Return the checksum of a tensor's type, shape and values."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode() + content).hexdigest()


def traits_of(model: nn.Module) -> dict[str, str]:
    """Return classes and settings that no tensor shows, by name.

    They are those of the modules without submodules, such as activations and dropout, and of
    torch's own layers with submodules, such as their number of heads.
    """
    traits = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Norm | FoldedNorm | FeatureAffine):
            continue
        if not module._modules:
            traits[name] = f"{type(module).__name__}({_ZEROS.sub('', module.extra_repr())})"
        elif type(module).__module__.startswith("torch.nn.modules"):
            traits[name] = f"{type(module).__name__}({', '.join(_settings_of(module))})"
    return traits


def _settings_of(module: nn.Module) -> list[str]:
    """Return the arguments that the layer was built with, as far as it stores them."""
    found = []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name in _FAST_PATH or name == "training":
            continue
        if isinstance(value, bool | int | float | str):
            found.append(f"{name}={_ZEROS.sub('', str(value))}")
        elif callable(value):
            found.append(f"{name}={getattr(value, '__name__', type(value).__name__)}")
    return found
