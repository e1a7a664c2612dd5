"""Saving and loading folded models: weights, and the changes of the original architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.checksums import (
    SAFETENSORS_KEY,
    SAFETENSORS_SEAL,
    check_seal,
    load_sealed,
    seal_archive,
    seal_safetensors,
)
from powernorm.errors import InputError
from powernorm.json_reading import parse_json
from powernorm.norms.buffers import is_optional_key
from powernorm.surgery.structure import Structure, build_structure

_KEY: Final = "powernorm_folded"
_SUFFIX: Final = ".safetensors"
_FORMAT: Final = "format"
_METADATA: Final = {_KEY, _FORMAT, SAFETENSORS_KEY}
_FIX: Final = "write it again with powernorm.save_folded or `powernorm fold`"


@dataclass(frozen=True)
class FoldedFile:
    """The contents of a file of a folded model.

    Args:
        structure: how the model differs from the original architecture.
        state_dict: its parameters and buffers by name.
        settings: the writer's settings, such as the configuration of the architecture.
    """

    structure: Structure
    state_dict: Mapping[str, Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)


def save_folded(
    model: nn.Module,
    structure: Structure,
    path: str | Path,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write a folded model: a plain state dict together with the structure, and a checksum.

    Args:
        model: the folded model.
        structure: from the report of its fold.
        path: with the suffix `.safetensors` for that format (needs the package safetensors), else
            a file of `torch.save`.
        settings: anything that JSON can hold, stored with the model.

    Raises:
        InputError: the file cannot be written, or safetensors is missing.
    """
    path = Path(path)
    described: dict[str, Any] = {"structure": structure.to_dict(), "settings": dict(settings or {})}
    state, shared = separate_tensors(model.state_dict())
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == _SUFFIX:
            text = json.dumps({**described, "shared": shared})
            metadata = {_KEY: text, _FORMAT: "pt", **SAFETENSORS_SEAL}
            _safetensors().save_file(state, str(temporary), metadata)
            with temporary.open("r+b") as file:
                seal_safetensors(file)
        else:
            full = {**state, **{name: state[first] for name, first in shared.items()}}
            torch.save({_KEY: json.dumps(described), "state_dict": full}, temporary)
            with temporary.open("r+b") as file:
                seal_archive(file)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"the model or its settings cannot be written to {path}: {error}; settings have to be "
            "JSON, and tensors that share memory in parts go into a .pt file only"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def read_folded(path: str | Path) -> FoldedFile:
    """Read a file of `save_folded`.

    Raises:
        InputError: the file is missing, damaged or not of this format.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is no file: give one that powernorm.save_folded wrote")
    try:
        described, state = _read(path)
        structure = Structure.from_dict(described["structure"])
        settings = dict(described["settings"])
        if not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise TypeError("its state dict holds something else than tensors")
    except InputError:
        raise
    except Exception as error:  # whatever a damaged file makes the readers raise
        reason = str(error).partition("\n")[0].partition(". ")[0]  # torch goes on for a page
        raise InputError(
            f"{path} is not a folded model ({type(error).__name__}: {reason}): give a file that "
            "powernorm.save_folded or `powernorm fold` wrote"
        ) from error
    return FoldedFile(structure, state, settings)


def load_folded(model: nn.Module, path: str | Path) -> nn.Module:
    """Turn a model of the original architecture into the folded one of a file, in place.

    Args:
        model: built with the same configuration, its norms swapped or not; its weights do not
            matter.
        path: a file of `save_folded`.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: it is no such file, or was made from another architecture; the model is
            unchanged then.
    """
    content = read_folded(path)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} is on the meta device, where nothing can be loaded: call "
            "model.to_empty(device=…) first"
        )
    changes = build_structure(model, content.structure)
    expected, given = model.state_dict(), content.state_dict
    problem = _mismatch(expected, given)
    if problem:
        changes.undo()
        raise InputError(
            f"{path} does not fit {type(model).__name__}: {problem}; build the model with the "
            "configuration that the file was made from"
        )
    model.load_state_dict(given)
    return model.eval()


def _mismatch(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    for what, missing in (
        ("the file lacks", expected.keys() - given.keys()),
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


def is_folded(metadata: Mapping[str, str]) -> bool:
    """Return whether a file of safetensors with these metadata holds a folded model."""
    return _KEY in metadata


def separate_tensors(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, each once, and the names that share one with an earlier name."""
    kept: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            shared[name] = first[key]
        else:
            first.setdefault(key, name)
            kept[name] = tensor.detach().contiguous()
    return kept, shared


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if path.suffix.lower() == _SUFFIX:
        check_seal(path, _FIX)
        with _safetensors().safe_open(str(path), "pt") as file:
            metadata = file.metadata()
            foreign = sorted(metadata.keys() - _METADATA)
            if foreign:
                # The key of a checksum with a flipped bit: without it the file would seem older.
                raise InputError(
                    f"{path} is damaged, its metadata have the key {foreign[0]!r}: {_FIX}"
                )
            described = parse_json(metadata[_KEY], str(path), _FIX)
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state |= {name: state[other] for name, other in described["shared"].items()}
        return described, state
    content = load_sealed(path, _FIX)
    return parse_json(content[_KEY], str(path), _FIX), content["state_dict"]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise InputError(
            "files of the kind .safetensors need the package safetensors: pip install "
            "'powernorm[hf]', or give a name that ends in .pt"
        ) from error
    return safetensors.torch
