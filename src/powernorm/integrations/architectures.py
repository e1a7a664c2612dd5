"""Models of transformers: their classes, and building and loading them from untrusted folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from powernorm.errors import InputError
from powernorm.integrations.extras import needed_for
from powernorm.records import CONFIG_FILE
from powernorm.surgery.saving.records import KEY

MODEL_TYPE: Final = "model_type"
"""Key of a Hugging Face configuration; the one of a run has none."""
_WHAT: Final = "a Hugging Face model"


def model_class(config: Mapping[str, Any]) -> Any:
    """Return the model class of transformers that a configuration names first; None for others.

    Only attributes of transformers on its own lists are looked up: the classes that its Auto
    classes choose from, and those of the family of models that the model type names.

    Args:
        config: contents of a `config.json`.

    Raises:
        ModuleNotFoundError: transformers is missing.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        return None
    with needed_for(_WHAT):
        import transformers
    home = _family(config.get(MODEL_TYPE))
    if home is None or name not in dir(home):
        home = transformers if name in _auto_names() else None
    kind = None if home is None else getattr(home, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else None


def build(folder: Path, kind: Any, *, generation: Any = None, **options: Any) -> nn.Module:
    """Build a model of a folder's configuration on torch's current device, without its weights.

    Args:
        folder: folder of the `config.json`.
        kind: class of transformers; None for the model below the head.
        generation: contents of a `generation_config.json`, if there is one.
        options: arguments beside the configuration.

    Raises:
        InputError: the configuration gives no model.
        ModuleNotFoundError: transformers is missing.
    """
    with needed_for(_WHAT):
        import transformers
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        make: Any = transformers.AutoModel.from_config if kind is None else kind._from_config
        with torch.random.fork_rng(devices=[]):
            built = make(config, dtype=torch.float32, **options)
        built.tie_weights()
        if generation is not None:
            built.generation_config = transformers.GenerationConfig.from_dict(generation)
    except Exception as error:  # a damaged configuration may raise anything
        raise InputError(
            f"{folder / CONFIG_FILE} gives no model: {type(error).__name__}: {error}"
        ) from error
    return cast(nn.Module, built)


def load_from(folder: Path, kind: Any = None, **options: Any) -> tuple[Any, tuple[str, ...]]:
    """Load a model of transformers from a folder; nothing is downloaded or printed.

    Args:
        folder: folder with configuration and weights.
        kind: class of transformers; None for the model below the head.
        options: arguments of `from_pretrained`.

    Returns:
        The model in evaluation mode on the CPU, its weights in their stored type, and the names of
        the missing weights, which are random.

    Raises:
        InputError: it cannot be loaded.
        ModuleNotFoundError: transformers is missing.
    """
    with needed_for(_WHAT):
        from transformers import AutoModel
    try:
        with _quietly(), torch.device("cpu"):
            model, info = (kind or AutoModel).from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # a damaged folder may raise anything
        raise InputError(
            f"{folder} holds no model that can be loaded: {type(error).__name__}: {error}"
        ) from error
    return model.eval(), tuple(sorted(info["missing_keys"]))


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of a Hugging Face model in its stored form."""
    config: Any = model.config
    described: dict[str, Any] = json.loads(config.to_json_string())
    described.pop(KEY, None)
    described.pop("architectures", None)
    # A user-defined class may have the name of one of transformers.
    named = {"architectures": [type(model).__name__]}
    if model_class({**named, MODEL_TYPE: config.model_type}) is type(model):
        described |= named
    described["dtype"] = str(cast(Any, model).dtype).removeprefix("torch.")
    return described


def _auto_names() -> set[str]:
    """Return the names in the tables of transformers' Auto classes."""
    from transformers.models.auto import modeling_auto

    tables = [
        table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")
    ]
    found = [name for table in tables for name in table.values()]
    # Some types of models have several classes.
    return {part for name in found for part in ([name] if isinstance(name, str) else name)}


def _family(model_type: object) -> Any:
    """Return transformers' package of a model type; None for an unknown type."""
    from transformers import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    return import_module(CONFIG_MAPPING[model_type].__module__.rpartition(".")[0])


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide bars and reports of transformers in the block: powernorm reports missing weights."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
