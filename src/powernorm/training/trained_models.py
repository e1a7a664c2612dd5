"""Models out of the run folders of a comparison, as they were trained or folded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.data.subwords import EncodedCorpus
from powernorm.errors import InputError
from powernorm.models.language_model import LanguageModel
from powernorm.runs import CHECKPOINTS_FOLDER, CONFIG_FILE
from powernorm.surgery import load_folded
from powernorm.surgery.storage import read_folded
from powernorm.training.batches import RunData
from powernorm.training.checkpoints import BEST, read_checkpoint
from powernorm.training.config import ComparisonConfig
from powernorm.training.language_modeling import build_language_model
from powernorm.training.overrides import from_json
from powernorm.training.run_folders import read_json
from powernorm.training.tasks import task_of

_PREFIX: Final = "model."
_OF_THE_RUN: Final = ("norm", "label", "seed", "data_fingerprint", "vocabulary_size")


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was built from.

    Args:
        model: in evaluation mode, on the CPU.
        settings: the run's `config.json`, and `vocabulary_size`; JSON.
        step: updates of the weights up to the checkpoint, where that is known.
    """

    model: LanguageModel
    settings: Mapping[str, Any]
    step: int | None = None

    def example_tokens(self) -> Tensor:
        """Random tokens of the model's length, (2, max_length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.model.max_length)
        return torch.randint(self.settings["vocabulary_size"], shape, generator=generator)


def load_trained(path: Path) -> TrainedModel:
    """Build the model of a run and load its weights.

    Args:
        path: a run's folder (its best checkpoint is taken) or one of its checkpoints.

    Raises:
        InputError: there is no such run, or a file of it is damaged.
    """
    checkpoint = path / CHECKPOINTS_FOLDER / BEST if path.is_dir() else path
    config = checkpoint.parent.parent / CONFIG_FILE
    if not checkpoint.is_file() or not config.is_file():
        raise InputError(
            f"{path} is no run of `powernorm compare`: give a run's folder, such as "
            "runs/lm-demo/bn-pre-seed0, or a checkpoint in it"
        )
    content = read_checkpoint(checkpoint)
    weights: dict[str, Tensor] = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in content["state_dict"].items()
        if name.startswith(_PREFIX)
    }
    try:
        settings = {**read_json(config), "vocabulary_size": len(weights["embedding.weight"])}
        model = _build(settings)
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise InputError(f"{checkpoint} and {config} do not fit each other: {error}") from error
    return TrainedModel(model, settings, int(content["global_step"]))


def load_folded_run(path: Path) -> TrainedModel:
    """Build the folded model that `powernorm fold` wrote.

    Raises:
        InputError: the file is damaged, or holds no model of a run.
    """
    settings = read_folded(path).settings
    if "vocabulary_size" not in settings:
        raise InputError(
            f"{path} does not say how its model was built: build it and use powernorm.load_folded"
        )
    model = _build(settings)
    load_folded(model, path)
    return TrainedModel(model, settings)


def run_data(settings: Mapping[str, Any], *, data: str | None = None) -> RunData:
    """Return the batches of a run, the same as when it was trained.

    Args:
        settings: of a `TrainedModel`.
        data: as for `run_text`.

    Raises:
        InputError: as `run_text`.
    """
    config = run_config(settings)
    return task_of(config).data(run_text(settings, data=data), config, int(settings["seed"]))


def run_text(settings: Mapping[str, Any], *, data: str | None = None) -> EncodedCorpus:
    """Return the text of a run over its subwords, or another text over the same subwords.

    Args:
        settings: of a `TrainedModel`.
        data: another text, or the same where it is no longer where the run found it, as `--data`
            takes it.

    Raises:
        InputError: a text cannot be read, or the run's is not what it was trained on.
    """
    config = run_config(settings)
    source, size = config.data.path, config.data.vocabulary_size
    task = task_of(config)
    encoded: EncodedCorpus
    if data is not None:
        encoded = task.encode(data, size)
        if encoded.fingerprint == settings.get("data_fingerprint"):
            return encoded
    encoded = task.encode(source, size)
    if encoded.fingerprint != settings.get("data_fingerprint"):
        raise InputError(
            f"{source or 'the embedded text'} is not the text that the run was trained on, or "
            "another version of tokenizers made its subwords: give that text with --data."
        )
    if data is None:
        return encoded
    other: EncodedCorpus = task.encode_by(data, source, size)
    return other


def training_batches(
    settings: Mapping[str, Any], num_batches: int, *, data: str | None = None
) -> list[dict[str, Tensor]]:
    """Return the first training batches of a run as keyword arguments of its model.

    Args:
        settings: of a `TrainedModel`.
        num_batches: how many; after the end of the text it begins anew.
        data: as for `run_data`.

    Raises:
        InputError: as `run_data`.
    """
    segments = run_data(settings, data=data).segments
    return [segments.batch(position).inputs() for position in range(num_batches)]


def run_config(settings: Mapping[str, Any]) -> ComparisonConfig:
    """Return the configuration of a run, as a comparison of one norm and seed."""
    seed, norm = int(settings["seed"]), str(settings["norm"])
    shared = {key: value for key, value in settings.items() if key not in _OF_THE_RUN}
    options = {norm: settings["norm_options"]}
    return from_json({**shared, "norm_options": options, "norms": [norm], "seeds": [seed]})


def _build(settings: Mapping[str, Any]) -> LanguageModel:
    seed, norm = int(settings["seed"]), str(settings["norm"])
    config = run_config(settings)
    model: nn.Module = build_language_model(config, norm, settings["vocabulary_size"], seed)
    assert isinstance(model, LanguageModel)
    return model.eval()
