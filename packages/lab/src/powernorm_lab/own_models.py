"""Trained models of users' functions, with batches to diagnose them."""

from pathlib import Path

from powernorm.integrations.model_sources import (
    ModelWithBatches,
    checked_pair,
    is_named,
    model_by_name,
)
from powernorm.norms.named_layers import names_of_files
from powernorm.records import CONFIG_FILE
from powernorm_lab.engine.folders import read_json
from powernorm_lab.engine.tasks import task_of


def is_own_run(path: Path) -> bool:
    """Return whether a folder is a run of a user's function."""
    config = path / CONFIG_FILE
    return config.is_file() and "function" in read_json(config)


def own_model(source: str) -> ModelWithBatches | None:
    """Return a model that comes with batches: `module:name`, or a run of a function.

    Args:
        source: name as commands accept it; other names give None.

    Raises:
        InputError: the model cannot be imported or loaded.
    """
    if is_named(source):
        return model_by_name(source)
    return load_own_run(Path(source)) if is_own_run(Path(source)) else None


@names_of_files()
def load_own_run(folder: Path) -> ModelWithBatches:
    """Load model and batches by the `load` of a run's task.

    Raises:
        InputError: the task cannot be imported, or has no `load`.
    """
    config = read_json(folder / CONFIG_FILE)
    name = str(config["function"]["name"])
    return checked_pair(task_of(name).load(folder), f"{name}, load({folder})")
