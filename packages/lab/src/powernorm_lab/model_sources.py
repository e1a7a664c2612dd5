"""Trained models, including runs of `compare`, with batches, by the names that commands accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from powernorm.errors import InputError
from powernorm.integrations.model_sources import ModelSource, own_source
from powernorm.integrations.pretrained import Pretrained
from powernorm_lab.data.readers import load_corpus
from powernorm_lab.engine.folders import read_json
from powernorm_lab.own_models import is_own_run, load_own_run
from powernorm_lab.runs import SUBWORDS_FILE
from powernorm_lab.tasks.trained_models import (
    SUBWORDS,
    is_folded,
    load_folded_run,
    load_trained,
    training_batches,
)

_ROWS = 8
_LENGTH = 128


def open_run(source: str) -> ModelSource:
    """Load the model of a run; `powernorm.integrations.model_sources.open_source` calls it.

    Args:
        source: a run's folder or checkpoint, or a folder that `powernorm fold` or `remove` wrote
            for a run.

    Raises:
        InputError: the model does not exist or cannot be loaded.
    """
    path = Path(source)
    if is_own_run(path):
        return own_source(source, load_own_run(path))
    trained = load_folded_run(path) if is_folded(path) else load_trained(path)
    settings = {**trained.settings, **_own_subwords(path)}
    return ModelSource("run", source, trained.model, trained.example_inputs(), settings)


def _own_subwords(checkpoint: Path) -> dict[str, Any]:
    """Return the run's subwords, which its folded model needs to translate outside the run."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent.parent
    file = folder / SUBWORDS_FILE
    return {SUBWORDS: read_json(file)} if file.is_file() else {}


def batches_of(source: ModelSource, number: int, data: str | None = None) -> list[Any]:
    """Return inputs of a model from real data.

    Args:
        source: the model.
        number: largest number of batches.
        data: text; required for a Hugging Face folder, optional for a run.

    Raises:
        InputError: the text is missing or too short, or the model comes with its own batches.
    """
    if source.kind == "own":
        if data is not None:
            raise InputError(f"{source.name} comes with its own batches: leave out --data")
        return list(source.own_batches[:number])
    if source.kind == "run":
        return training_batches(source.settings, number, data=data)
    return _texts(source, number, data)


def _texts(source: ModelSource, number: int, data: str | None) -> list[Any]:
    if data is None:
        raise InputError(f"{source.name} comes without a text: give one, --data TEXT")
    texts = load_corpus(data).documents["train"][: number * _ROWS]
    batches = Pretrained(Path(source.name), source.model).batches(texts, _ROWS, _LENGTH)
    if not batches:
        raise InputError(
            f"{data} has {len(texts)} documents, fewer than the {_ROWS} of a batch: give more text"
        )
    return batches
