"""Models from run folders of a comparison, trained or folded."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

import powernorm
from powernorm.errors import InputError
from powernorm.integrations.model_sources import check_folder
from powernorm.json_reading import SEAL
from powernorm.norms.named_layers import names_of_files
from powernorm.records import CONFIG_FILE, MODEL_FILE
from powernorm.surgery.saving.records import KEY
from powernorm_lab.data.catalog import check_known_set
from powernorm_lab.engine.averaging import AVERAGE, read_weights, step_of
from powernorm_lab.engine.folders import BEST, EARLY, LAST, find_runs, read_json, read_result
from powernorm_lab.engine.state import FIX, read_checkpoint
from powernorm_lab.runs import AVERAGE_SCORED, CHECKPOINTS_FOLDER, LAST_SCORED
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.builtin import RUN_KEYS
from powernorm_lab.tasks.registry import settings_from, task_of
from powernorm_lab.training.batches import RunData
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.task import Sizes

SUBWORDS: Final = "subwords"
"""Key of the subwords of a translation in the settings of a folded model."""
_OF_THE_RUN: Final = (*RUN_KEYS, "vocabulary_size", SUBWORDS)


@dataclass(frozen=True)
class TrainedModel:
    """A model with the settings that it was built from.

    Args:
        model: model in evaluation mode, on the CPU.
        settings: the run's `config.json` with `vocabulary_size`, as JSON.
        step: number of updates up to the checkpoint; None if unknown.
    """

    model: TaskModel
    settings: Mapping[str, Any]
    step: int | None = None

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return random inputs of the model's forward."""
        config = run_config(self.settings)
        return task_of(config).example_inputs(config, _sizes(self.settings))


@names_of_files()
def load_trained(path: str | Path) -> TrainedModel:
    """Build the model of a run and load its weights.

    Args:
        path: a run's folder, for the weights that were scored (the average of the last checkpoints
            if there is one, else the best), or one of its checkpoints.

    Raises:
        InputError: there is no such run, one of its files is damaged, or the module of its custom
            norm is not imported.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give the folder of a trained model, such as "
            "runs/lm-demo/bn-pre-seed0"
        )
    checkpoint = _scored(path) if path.is_dir() else path
    config = checkpoint.parent.parent / CONFIG_FILE
    if config.is_file() and "function" in (own := read_json(config)):
        raise InputError(
            f"{config.parent} is a run of {own['task']}, a function of your own, whose model is "
            "not known: powernorm_lab.saved_states reads the states that it tracked"
        )
    if checkpoint.is_symlink() and not checkpoint.exists():
        raise InputError(f"{checkpoint} is a broken link: restore the file")
    if checkpoint != path and checkpoint.is_dir():
        raise InputError(f"{checkpoint} is a folder, not a checkpoint: restore the file")
    if not checkpoint.is_file() or not config.is_file():
        runs = [str(run) for run in find_runs(path)]
        example = " or ".join(runs[:3]) or "runs/lm-demo/bn-pre-seed0, or a checkpoint in it"
        raise InputError(
            f"{path} is no run of `powernorm compare`: give a run's folder, such as {example}"
        )
    weights, step = _read(checkpoint)
    read = read_json(config)
    try:
        sizes = list(task_of(run_config(read)).sizes_of_weights(weights))
        # A single vocabulary is stored as a number, as in older files.
        settings = {**read, "vocabulary_size": sizes if len(sizes) > 1 else sizes[0]}
        model = _build(settings)
        model.load_state_dict(weights)
    except InputError as error:
        raise InputError(f"{config}: {error}") from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{checkpoint} and {config} do not fit each other: {error}") from error
    return TrainedModel(model, settings, step)


def scored_step(path: Path) -> int | None:
    """Return the number of updates of a run's scored weights; None if unknown.

    Raises:
        InputError: the weights are damaged or missing.
    """
    return _read(_scored(path))[1]


def is_checkpoint(path: Path) -> bool:
    """Return whether a file has the name of a run's checkpoint."""
    return path.name in (LAST, BEST, EARLY, AVERAGE) or step_of(path) is not None


def _scored(run: Path) -> Path:
    """Return the file of a run's scored weights.

    Raises:
        InputError: the average was scored, and its file is missing.
    """
    average, best, last = (run / CHECKPOINTS_FOLDER / name for name in (AVERAGE, BEST, LAST))
    if average.exists() or average.is_symlink():
        return average
    scored = ""
    with suppress(InputError):  # the result is damaged: use the best checkpoint
        result = read_result(run)
        scored = "" if result is None else result.scored
    if scored == LAST_SCORED:
        return last
    if scored.startswith(AVERAGE_SCORED):
        raise InputError(
            f"{average} with the scored weights is missing: restore it, or name another "
            f"checkpoint, such as {best}"
        )
    return best


def _read(checkpoint: Path) -> tuple[dict[str, Tensor], int | None]:
    """Return the weights of the model and their number of updates."""
    if checkpoint.suffix == ".safetensors":
        found = read_weights(checkpoint)
        return {key.removeprefix("model."): found[key] for key in found}, step_of(checkpoint)
    content = read_checkpoint(checkpoint)
    try:
        return dict(content["states"]["model"]), int(content["step"])
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(
            f"{checkpoint} is not a checkpoint of a run ({type(error).__name__} {error}): {FIX}"
        ) from error


@names_of_files()
def load_folded_run(path: Path) -> TrainedModel:
    """Build the folded model that `powernorm fold` wrote.

    Args:
        path: the folder.

    Raises:
        InputError: a file is damaged, or the folder holds no model of a run.
    """
    check_folder(path)
    settings = read_json(path / CONFIG_FILE)
    model = _build(settings)
    powernorm.load(path, model)
    return TrainedModel(model, settings)


def is_folded(path: Path) -> bool:
    """Return whether a path is a folder that `powernorm fold` wrote."""
    return (path / MODEL_FILE).is_file()


def run_data(settings: Mapping[str, Any], *, data: str | None = None) -> RunData[Any]:
    """Return the batches of a run, the same as in its training.

    Args:
        settings: settings of a `TrainedModel`.
        data: see `run_text`.

    Raises:
        InputError: as `run_text`.
    """
    config = run_config(settings)
    return task_of(config).data(run_text(settings, data=data), config, int(settings["seed"]))


def run_text(settings: Mapping[str, Any], *, data: str | None = None) -> Any:
    """Return the text of a run, or another text, encoded with the vocabulary of the run.

    Args:
        settings: settings of a `TrainedModel`.
        data: another text, or the run's text at its new place, as for `--data`.

    Raises:
        InputError: a text cannot be read, is a data set of another task, or is not the text that
            the run was trained on.
    """
    config = run_config(settings)
    source = config.data.path
    task = task_of(config)
    if data is not None:
        check_known_set(data, config.task)
        encoded = task.encode(replace(config, data=replace(config.data, path=data)))
        if encoded.fingerprint == settings.get("data_fingerprint"):
            return encoded
    encoded = task.encode(config)
    if encoded.fingerprint != settings.get("data_fingerprint"):
        raise InputError(
            f"{source or 'the embedded text'} is not the text that the run was trained on, or its "
            "subwords were made by another version of tokenizers: give that text with --data"
        )
    if data is None:
        return encoded
    return task.encode(config, data)


def training_batches(
    settings: Mapping[str, Any], num_batches: int, *, data: str | None = None
) -> list[dict[str, Tensor]]:
    """Return the first training batches of a run as keyword arguments of its model.

    A batch without padding has no mask, unless another one has it.

    Args:
        settings: settings of a `TrainedModel`.
        num_batches: number of batches; they repeat after the end of the text.
        data: see `run_text`.

    Raises:
        InputError: as `run_data`.
    """
    return first_inputs(run_data(settings, data=data), num_batches)


def first_inputs(data: RunData[Any], num_batches: int) -> list[dict[str, Tensor]]:
    """Return the inputs of the first training batches, with the masks that any of them has."""
    batches = [data.batches.batch(position) for position in range(num_batches)]
    names = {name for batch in batches for name in batch.named}
    return [batch.masked(names).inputs() for batch in batches]


@names_of_files()
def run_config(settings: Mapping[str, Any]) -> ComparisonSettings:
    """Return the configuration of a run as a comparison of one norm and seed."""
    seed, norm = settings["seed"], str(settings["norm"])
    others = (*_OF_THE_RUN, KEY, SEAL)  # SEAL is in files that were read as plain JSON
    shared = {key: value for key, value in settings.items() if key not in others}
    options = {norm: settings["norm_options"]}
    return settings_from({**shared, "norm_options": options, "norms": [norm], "seeds": [seed]})


def _sizes(settings: Mapping[str, Any]) -> Sizes:
    sizes = settings["vocabulary_size"]
    return tuple(sizes) if isinstance(sizes, list) else (sizes,)


def _build(settings: Mapping[str, Any]) -> TaskModel:
    config = run_config(settings)
    (norm,), (seed,) = config.norms, config.seeds
    return task_of(config).build(config, norm, _sizes(settings), seed).eval()
