"""Models by the names that commands accept: `module:name` and folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from torch import nn

from powernorm.diagnosis import Diagnosis, diagnose
from powernorm.errors import InputError
from powernorm.inspection.batches import Progress
from powernorm.inspection.devices import Device
from powernorm.integrations.extras import LABORATORY, MODELS, install_command, plugins
from powernorm.integrations.pretrained import is_pretrained, load_pretrained
from powernorm.norms.named_layers import imported
from powernorm.records import CONFIG_FILE, MODEL_FILE
from powernorm.surgery.saving.storage import read_config

Kind = Literal["pretrained", "own", "run"]
_OF_A_RUN: Final = "vocabulary_size"
"""Configuration key that says how the model of a run is built."""


class ModelWithBatches(NamedTuple):
    """A model, and batches in its format: tensors, tuples or mappings of keyword arguments."""

    model: nn.Module
    batches: Sequence[Any]


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A trained model.

    Attributes:
        kind: a Hugging Face folder, a user's model with its batches, or a run of `compare`.
        name: name as it was given.
        model: the model in evaluation mode, on the CPU.
        example_inputs: inputs of its forward, random except for a user's model.
        settings: settings of a run.
        own_batches: batches of a user's model.
    """

    kind: Kind
    name: str
    model: nn.Module
    example_inputs: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    own_batches: Sequence[Any] = ()


def is_named(source: str) -> bool:
    """Return whether a model is given as `module:name` and not as a path."""
    return ":" in source and not Path(source).exists()


def open_source(source: str) -> ModelSource:
    """Return a trained model.

    Args:
        source: `module:name` of (model, batches), a folder in Hugging Face's layout, or one that
            an installed distribution opens by an entry point of `powernorm.models`: runs and
            checkpoints of comparisons.

    Raises:
        InputError: the model cannot be loaded, or no installed package can open the folder.
    """
    if is_named(source):
        return own_source(source, model_by_name(source))
    path = Path(source)
    if path.is_dir() and is_pretrained(path):
        found = load_pretrained(path, with_head=True, complete=True)
        return ModelSource("pretrained", source, found.model, found.example_inputs())
    check_folder(path)
    for opener in plugins(MODELS):
        return cast(ModelSource, opener.load()(source))
    raise InputError(
        f"{source} is not a folder of a Hugging Face model, and runs of comparisons are opened by "
        f"{LABORATORY}, which is not installed: {install_command(LABORATORY)}"
    )


def own_source(name: str, found: ModelWithBatches) -> ModelSource:
    """Return a user's model; its first batch is the example."""
    return ModelSource("own", name, found.model, found.batches[0], own_batches=found.batches)


def check_folder(path: Path) -> None:
    """Raise an InputError for a path without a model, or with one that only its user can build.

    Raises:
        InputError: the path does not exist, or `powernorm.save` wrote the model without its class.
    """
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give the folder of a trained model, such as "
            "runs/lm-demo/bn-pre-seed0, or module:name of (model, batches)"
        )
    if not (path / MODEL_FILE).is_file() or is_pretrained(path):
        return
    if not (path / CONFIG_FILE).is_file() or _OF_A_RUN not in read_config(path):
        raise InputError(
            f"{path} does not record how its model was built: give module:name of a function that "
            f"returns (powernorm.load({str(path)!r}, the built model), batches)"
        )


def result_of(name: str) -> object:
    """Return the object of `module:name`, or the result of the function with that name.

    Raises:
        InputError: it cannot be imported, or the function fails.
    """
    found = imported(name)
    if not callable(found) or isinstance(found, nn.Module):
        return found
    try:
        return found()
    except InputError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise InputError(
            f"{name}() failed ({type(error).__name__}: {error}): name a function without arguments "
            "that builds the model"
        ) from error


def model_by_name(name: str) -> ModelWithBatches:
    """Return the model and batches of `module:name`.

    Raises:
        InputError: as in `result_of`, or it is something else.
    """
    return checked_pair(result_of(name), name)


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


def checked_pair(found: Any, name: str) -> ModelWithBatches:
    """Return a model with batches.

    Args:
        found: result of a user's function.
        name: name of the function, for the error.

    Raises:
        InputError: it has another type.
    """
    message = (
        f"{name} gives a {type(found).__name__}, expected (model, batches): the module, and a list "
        "of at least two batches in its format"
    )
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], nn.Module):
        raise InputError(message)
    model, batches = found
    kept = list(batches)
    if len(kept) < 2:
        raise InputError(message)
    return ModelWithBatches(model.eval(), kept)
