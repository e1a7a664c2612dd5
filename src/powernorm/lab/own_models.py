"""Trained models of the user's own functions, and models by name, with batches to look at them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from powernorm.diagnosis import Diagnosis, diagnose
from powernorm.errors import InputError
from powernorm.inspection.batches import Progress
from powernorm.inspection.devices import Device
from powernorm.lab.engine.folders import read_json
from powernorm.lab.engine.tasks import task_of
from powernorm.norms.named_layers import imported
from powernorm.runs import CONFIG_FILE


class ModelWithBatches(NamedTuple):
    """A model, and batches as it takes them: tensors, tuples or mappings of keyword arguments."""

    model: nn.Module
    batches: Sequence[Any]


def is_own_run(path: Path) -> bool:
    """Return whether a folder is a run of a user's function."""
    config = path / CONFIG_FILE
    return config.is_file() and "function" in read_json(config)


def load_own_run(folder: Path) -> ModelWithBatches:
    """Return what the task of a run loads from its folder.

    Raises:
        InputError: the function cannot be imported, or does not say how its model is loaded.
    """
    config = read_json(folder / CONFIG_FILE)
    name = str(config["function"]["name"])
    return _checked(task_of(name).load(folder), f"{name}, load({folder})")


def model_by_name(name: str) -> ModelWithBatches:
    """Return what `module:name` names, or what the function of that name returns.

    Raises:
        InputError: it cannot be imported, fails, or is something else.
    """
    found = imported(name)
    if callable(found) and not isinstance(found, nn.Module):
        try:
            found = found()
        except InputError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise InputError(f"{name}() failed ({type(error).__name__}: {error})") from error
    return _checked(found, name)


def diagnose_own(
    found: ModelWithBatches,
    name: str,
    num_batches: int,
    *,
    device: Device | None = None,
    on_progress: Progress | None = None,
) -> Diagnosis:
    """Diagnose a model on the first of its batches."""
    report = diagnose(
        found.model, found.batches[:num_batches], device=device, on_progress=on_progress
    )
    return replace(report, model=name)


def _checked(found: Any, name: str) -> ModelWithBatches:
    message = (
        f"{name} gives a {type(found).__name__}, expected (model, batches): the module, and a list "
        "of at least two batches as it takes them"
    )
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], nn.Module):
        raise InputError(message)
    model, batches = found
    kept = list(batches)
    if len(kept) < 2:
        raise InputError(message)
    return ModelWithBatches(model.eval(), kept)
