"""Saving and loading models that were swapped or folded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.files import write
from powernorm.integrations.architectures import MODEL_TYPE, build, config_of, model_class
from powernorm.integrations.stock_models import save_stock
from powernorm.json_reading import read_json
from powernorm.norms.arguments import check_model
from powernorm.norms.preserved_state import made_like
from powernorm.records import CONFIG_FILE, MODEL_FILE
from powernorm.surgery.saving.loading import fill_model
from powernorm.surgery.saving.records import KEY, REBUILD, ModelRecord, is_pretrained
from powernorm.surgery.saving.storage import (
    SavedModel,
    first_difference,
    read_config,
    read_model,
    traits_of,
    write_model,
)

_RENAMED: Final = (
    "transformers may have renamed or omitted some weights: save the model with powernorm.save"
)
_HEADLESS: Final = (
    "the model was saved with a head: build the given one without modules that it lacks, such as "
    "add_pooling_layer=False, or leave it out"
)
_OF_THE_WAY: Final = (KEY, "architectures", "dtype", "transformers_version", "_name_or_path")
"""Keys of a configuration about its origin, which do not affect the computation."""
_ATTENTION: Final = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)
_GENERATION: Final = "generation_config"
_TRAITS: Final = "traits"
"""Key of the settings of torch's modules in a model without a configuration."""
_STOCK: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    stock: bool = False,
) -> None:
    """Write a swapped or folded model, so that `powernorm.load` can rebuild it.

    The folder gets `powernorm.safetensors` (parameters, statistics, the record of all changes, and
    a checksum) and `config.json`, with the same record under the key `powernorm`. The weights have
    no name that other libraries look for, so `from_pretrained` of this folder ends in an error
    instead of a model with other norms. Nothing is pickled. Hooks are not written, except the
    padding mask's.

    Args:
        model: a model of Hugging Face or any other, in any mode; within `DistributedDataParallel`
            or `torch.compile` the inner model is written.
        folder: created if missing; an earlier model of `powernorm.save` in it is replaced.
        config: entries of `config.json`, JSON; by default the configuration of a Hugging Face
            model, and nothing for others.
        stock: write a checkpoint of the original architecture instead, `model.safetensors`, for a
            Hugging Face model whose own classes can hold its norms: this library's
            `ln` and `rms` in place of LayerNorm and RMSNorm, or static norms, folded or not, in
            place of a BatchNorm of torch; or its LayerNorms and RMSNorms with folded weights
            (`keep="statistics"`). Static norms that are not folded fit in the place of
            RMSNorm, and those that center (`match-centered`, `freeze` and `taper` of `powernorm
            remove`) in that of LayerNorm: the configuration then gets an eps so large that the
            class divides by a constant. The checkpoint is loaded and compared.

    Raises:
        InputError: the folder cannot be written or holds other weights, the model holds no norm of
            this library, or parts that cannot be saved (adapters of PEFT, quantized or distributed
            tensors); with `stock`, norms that do not fit, with a fix.

    >>> import tempfile
    >>> def build():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> model = build()
    >>> _ = powernorm.swap(model, to="rbn")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     powernorm.save(model, folder)
    ...     loaded = powernorm.load(folder, build())
    >>> type(loaded[1]).__name__
    'RegularizedBatchNorm'
    """
    check_model(model)
    path = _path_of(folder)
    model = _unwrapped(model)
    _check_parts(model)
    if stock:
        save_stock(model, path)
        return
    if config is None:
        config = config_of(model) if is_pretrained(model) else {}
    generation = getattr(model, "generation_config", None) if is_pretrained(model) else None
    more = {} if generation is None else {_GENERATION: json.loads(generation.to_json_string())}
    write_model(model, path, config, more)


def load(folder: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Load a model of `powernorm.save`, including its norms, folded weights and masks.

    This also reads a swapped model that the Trainer or `save_pretrained` of Hugging Face wrote: its
    `config.json` has the key `powernorm` too, which `from_pretrained` ignores. For such a
    folder the model below the head, which `AutoModel` builds, can be given as well.

    Args:
        folder: the folder.
        model: a model of the original architecture, which is changed in place; its weights do not
            matter, and its norms may be swapped or not. A Hugging Face model is built from its
            `config.json` by default.

    Returns:
        The model, in evaluation mode and on the CPU, or on the device of the given one.

    Raises:
        InputError: a file is missing or damaged, the model has to be given, or is of another
            architecture; a given one is unchanged then.
        ModuleNotFoundError: transformers is missing.
    """
    path = _path_of(folder)
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: give one that powernorm.save wrote")
    if model is not None:
        check_model(model)
        _check_unwrapped(model)
    with torch.inference_mode(False) if model is None else made_like(model):
        return _load(path, model)


def _load(path: Path, model: nn.Module | None) -> nn.Module:
    if (path / MODEL_FILE).is_file():
        saved = read_model(path)
        if model is None:
            model = _built(path, saved.config, saved.more.get(_GENERATION))
        else:
            _check_configuration(model, saved.config, path)
        return fill_model(model, saved, path)
    config = read_config(path)
    if not config.get(KEY):
        raise InputError(
            f"{path} holds no {MODEL_FILE}, and its config.json has no key {KEY!r}: it is not a "
            "model that powernorm has changed"
        )
    if model is None:
        generation = path / "generation_config.json"
        model = _built(path, config, read_json(generation, "") if generation.is_file() else None)
    fix = _HEADLESS if _base_in(config, model) else _RENAMED
    return fill_model(model, _read_stock(path, config, model), path, fix)


def note_modules(model: nn.Module, folder: Path) -> None:
    """Write the key `powernorm` into the `config.json` of weights that another library wrote.

    Args:
        model: model whose weights the folder holds.
        folder: nothing is written if it is missing or has the key.

    Raises:
        InputError: `config.json` is damaged, or the model has a norm that cannot be rebuilt.
    """
    record = ModelRecord.of(_unwrapped(model))
    if not folder.is_dir() or record.is_empty:
        return
    file = folder / CONFIG_FILE
    config = read_config(folder) if file.exists() else {}
    if not config.get(KEY):
        noted = {**record.to_dict(), _TRAITS: traits_of(_unwrapped(model))}
        text = json.dumps({**config, KEY: noted}, indent=2, sort_keys=True) + "\n"
        write(file, text)


def place_modules(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Apply the recorded swaps and folds to a model of the architecture, without values.

    Args:
        model: built from the configuration, on any device, including the meta device.
        folder: folder of the configuration.
        config: `config.json`; without the key `powernorm` nothing changes.

    Raises:
        InputError: the record is damaged, or of another model.
    """
    if config.get(KEY):
        _stock_record(folder, config, model, "").apply(model, {})


def _path_of(folder: object) -> Path:
    """Return a folder's path.

    Raises:
        InputError: the path is invalid on this system.
    """
    try:
        path = Path(folder)  # type: ignore[arg-type]
        path.exists()
    except (TypeError, ValueError, OSError) as error:
        raise InputError(f"folder is {folder!r}, expected the path of a folder: {error}") from error
    return path


def _check_unwrapped(model: nn.Module) -> None:
    """Raise an InputError if a model that is to be changed is wrapped."""
    inner = _unwrapped(model)
    if inner is not model:
        raise InputError(
            f"the model is in a {type(model).__name__}, which would not see the loaded weights: "
            "give the inner model, and wrap it afterwards"
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch's wrappers."""
    while True:
        if isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = cast(nn.Module, model.module)
        else:
            return model


def _check_parts(model: nn.Module) -> None:
    """Raise an InputError if a part of the model could not be rebuilt."""
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:
            raise InputError(
                f"{name!r} is compiled, which changes the names of its tensors: save the model as "
                "it was before torch.compile, whose parameters are the same"
            )
        if type(module).__module__.partition(".")[0] == "peft":
            raise InputError(
                f"{name or 'the model'} is a {type(module).__name__} of PEFT, which has files of "
                "its own: save the model before the adapters are put in, and the adapters by "
                "save_pretrained with modules_to_save naming the norms; or save what "
                "merge_and_unload() returns"
            )


def _check_configuration(model: nn.Module, config: Mapping[str, Any], path: Path) -> None:
    """Raise an InputError if a given Hugging Face model has another configuration."""
    if not is_pretrained(model) or MODEL_TYPE not in config:
        return
    here, there = (
        {key: value for key, value in one.items() if key not in _OF_THE_WAY}
        for one in (config_of(model), config)
    )
    key = first_difference(here, there)
    if key is not None:
        raise InputError(
            f"{path} does not fit {type(model).__name__}: {key} of its configuration is "
            f"{there.get(key)!r} there and {here.get(key)!r} here; {REBUILD}"
        )


def _built(path: Path, config: Mapping[str, Any], generation: Any = None) -> nn.Module:
    """Build a Hugging Face model for loaded values; only a class of transformers itself."""
    names = config.get("architectures")
    fix = f"build the model as it was before it was saved, and powernorm.load({str(path)!r}, model)"
    if MODEL_TYPE not in config or not isinstance(names, list) or len(names) != 1:
        raise InputError(f"{path / CONFIG_FILE} does not describe a Hugging Face model: {fix}")
    kind = model_class(config)
    if kind is None:
        raise InputError(f"{names[0]!r} in {path / CONFIG_FILE} is no model of transformers: {fix}")
    from transformers.initialization import no_init_weights

    attention = _attention_of(config)
    options = {} if attention is None else {"attn_implementation": attention}
    filled = no_init_weights() if (path / MODEL_FILE).is_file() else nullcontext()
    with torch.device("cpu"), filled:
        return build(path, kind, generation=generation, **options)


def _attention_of(config: Mapping[str, Any]) -> Any:
    """Return the attention implementation of the model, unless it would have to be downloaded."""
    record = config.get(KEY)
    attention = record.get("attention") if isinstance(record, dict) else None
    each = attention.values() if isinstance(attention, dict) else [attention]
    return attention if all(one in _ATTENTION for one in each) else None


def _read_stock(path: Path, config: Mapping[str, Any], model: nn.Module) -> SavedModel:
    """Read weights under their stock names, as Hugging Face's libraries write them."""
    state = dict(_stock_tensors(path))
    base = _base_in(config, model)
    if base:
        state = {
            name.removeprefix(f"{base}."): value
            for name, value in state.items()
            if name.startswith(f"{base}.")
        }
    record = _stock_record(path, config, model, base)
    shared: dict[str, str] = {}
    named: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    for names in named.values():
        # Files contain only one of tied weights, unless folding has untied them.
        first = next((name for name in names if name in state), None)
        missing = [name for name in names if name not in state]
        if first is not None:
            shared |= dict.fromkeys(missing, first)
            state |= dict.fromkeys(missing, state[first])
    # Tables that are computed when the model is built, such as sinusoids, are in no file.
    computed = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) - state.keys()
    state |= {name: value for name, value in model.state_dict().items() if name in computed}
    traits = config[KEY].get(_TRAITS, {})
    return SavedModel(record, state, shared=shared, traits=traits, config=config)


def _base_in(config: Mapping[str, Any], model: nn.Module) -> str:
    """Return the attribute of the saved model with a head that holds the given model."""
    record = config[KEY]
    root = record.get("root") if isinstance(record, dict) else None
    base = str(getattr(model, "base_model_prefix", "")) if is_pretrained(model) else ""
    # A given model with a head has the part under that name.
    is_base = bool(base) and base not in model._modules and root != type(model).__name__
    return base if is_base and root in config.get("architectures", ()) else ""


def _stock_record(
    path: Path, config: Mapping[str, Any], model: nn.Module, base: str
) -> ModelRecord:
    """Return the record of the model's changes, which may be in several of its parts.

    Args:
        path: the folder.
        config: its configuration.
        model: model to load into.
        base: attribute of the saved model that holds this model; "" if they are the same.
    """
    values = config[KEY]
    others = values.get("others", []) if isinstance(values, dict) else []
    try:
        found = [ModelRecord.from_dict(one) for one in (values, *others)]
    except (TypeError, ValueError) as error:
        raise InputError(f"the key {KEY!r} of {path / 'config.json'}: {error}") from error
    placed = [
        record.inside(base) if base else record.below(_place_of(record, model, path))
        for record in found
    ]
    masks: dict[str, list[str]] = {}
    for record in placed:
        for root, names in record.masks.items():
            masks.setdefault(root, []).extend(names)
    return replace(
        placed[0],
        parts=tuple(part for record in placed for part in record.parts),
        made=tuple(name for record in placed for name in record.made),
        masks=masks,
        erased=tuple(name for record in placed for name in record.erased),
    )


def _place_of(record: ModelRecord, model: nn.Module, path: Path) -> str:
    """Return the dotted name of the part of a model that a record describes."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = {inner for inner, _ in module.named_modules(remove_duplicate=False)}
        if type(module).__name__ == record.root and inside.issuperset(record.names()):
            found.append(name)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no {record.root} with the modules that "
            f"{path / 'config.json'} names: build the model as it was before it was swapped"
        )
    return found[0]


def _stock_tensors(path: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    files = [_STOCK]
    # In the order of transformers, which does not delete an old index after writing one file.
    if not (path / _STOCK).is_file() and (path / _INDEX).is_file():
        try:
            index = json.loads((path / _INDEX).read_bytes())
            files = sorted({Path(name).name for name in index["weight_map"].values()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"{path / _INDEX} is damaged ({error}): restore it") from error
    if not all((path / name).is_file() for name in files):
        raise InputError(f"{path} holds no {MODEL_FILE} and no {_STOCK}: there is nothing to load")
    tensors: dict[str, Tensor] = {}
    try:
        for name in files:
            tensors |= load_file(path / name)
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"{path / name} is damaged ({error}): restore it") from error
    return tensors
