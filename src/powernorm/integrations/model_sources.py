"""Models by the names that commands take: `module:name` and folders."""

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
from powernorm.integrations.folded_pretrained import example_inputs, load_whole
from powernorm.integrations.pretrained import is_pretrained
from powernorm.norms.named_layers import imported
from powernorm.records import CONFIG_FILE, MODEL_FILE
from powernorm.surgery.saving.storage import read_config

Kind = Literal["pretrained", "own", "run"]
_OF_A_RUN: Final = "vocabulary_size"
"""Key of a configuration by which the model of a run is built."""


class ModelWithBatches(NamedTuple):
    """A model, and batches as it takes them: tensors, tuples or mappings of keyword arguments."""

    model: nn.Module
    batches: Sequence[Any]


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A trained model.

    Attributes:
        kind: a Hugging Face folder, a user's model with its batches, or a run of `compare`.
        name: as it was given.
        model: in evaluation mode, on the CPU.
        example_inputs: of its forward, random but for a user's model.
        settings: of a run.
        own_batches: of a user's model.
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
        InputError: the model cannot be loaded, or nothing here can open the folder.
    """
    if is_named(source):
        return own_source(source, model_by_name(source))
    path = Path(source)
    if path.is_dir() and is_pretrained(path):
        model = load_whole(path)
        return ModelSource("pretrained", source, model, example_inputs(model))
    check_folder(path)
    for opener in plugins(MODELS):
        return cast(ModelSource, opener.load()(source))
    raise InputError(
        f"{source} is no folder of a Hugging Face model, and the runs of comparisons are opened by "
        f"{LABORATORY}, which is not installed: {install_command(LABORATORY)}"
    )


def own_source(name: str, found: ModelWithBatches) -> ModelSource:
    """Return a user's model; its first batch is the example."""
    return ModelSource("own", name, found.model, found.batches[0], own_batches=found.batches)


def check_folder(path: Path) -> None:
    """Raise an InputError for a path that names no model, or one that only its user builds.

    Raises:
        InputError: nothing is there, or a model that `powernorm.save` wrote without its class.
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
            f"{path} does not say how its model was built: give module:name of a function that "
            f"returns (powernorm.load({str(path)!r}, the built model), batches)"
        )


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
    return checked_pair(found, name)


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


def check_own(source: str, given: Mapping[str, object]) -> None:
    """Raise an InputError for options that a model with batches of its own does not take.

    Args:
        source: the model, as it was given.
        given: values by option; None where an option is left out.

    Raises:
        InputError: one is given.
    """
    for option, value in given.items():
        if value is not None:
            raise InputError(
                f"{source} has batches of its own, and no score is known: leave out {option}"
            )


def checked_pair(found: Any, name: str) -> ModelWithBatches:
    """Return a model with batches.

    Args:
        found: what a user's function gave.
        name: of it, for the error.

    Raises:
        InputError: it is something else.
    """
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
