"""Classes of transformers by their names in an untrusted `config.json`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

from torch import nn

from powernorm.integrations.extras import needed_for
from powernorm.surgery.saving.records import KEY


def model_class(name: object, model_type: object) -> Any:
    """Return the model class of transformers with a name; None for any other name.

    Only attributes of transformers on its own lists are looked up: the classes that its Auto
    classes choose from, and those of the family of models that `model_type` names.

    Args:
        name: name of the class, as in `architectures` of a configuration.
        model_type: model type of the same configuration.

    Raises:
        ModuleNotFoundError: transformers is missing.
    """
    with needed_for("a Hugging Face model"):
        import transformers
    if not isinstance(name, str):
        return None
    home = _family(model_type)
    if home is None or name not in dir(home):
        home = transformers if name in _auto_names() else None
    kind = None if home is None else getattr(home, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else None


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of a Hugging Face model in its stored form."""
    config: Any = model.config
    described: dict[str, Any] = json.loads(config.to_json_string())
    described.pop(KEY, None)
    described.pop("architectures", None)
    # A user-defined class may have the name of one of transformers.
    if model_class(type(model).__name__, config.model_type) is type(model):
        described["architectures"] = [type(model).__name__]
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
def loading_quietly() -> Iterator[None]:
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
