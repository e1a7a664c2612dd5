"""Trained models by the name that commands take, runs of `compare` included, with batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.integrations.model_sources import ModelSource, open_source, own_source
from powernorm.integrations.pretrained import Pretrained, check_reads_text, load_tokenizer
from powernorm.lab.data.batch import MASK
from powernorm.lab.data.readers import load_corpus
from powernorm.lab.own_models import own_model
from powernorm.lab.tasks.trained_models import (
    is_folded,
    load_folded_run,
    load_trained,
    training_batches,
)

_ROWS = 8
_LENGTH = 128


def open_model(source: str) -> ModelSource:
    """Return a trained model.

    Args:
        source: as `open_source` takes it, a run's folder or checkpoint, or a folder that
            `powernorm fold` or `remove` wrote of a run.

    Raises:
        InputError: there is no such model, or it cannot be loaded.
    """
    own = own_model(source)
    found = open_source(source) if own is None else own_source(source, own)
    if found is not None:
        return found
    path = Path(source)
    trained = load_folded_run(path) if is_folded(path) else load_trained(path)
    return ModelSource("run", source, trained.model, trained.example_inputs(), trained.settings)


def batches_of(source: ModelSource, number: int, data: str | None = None) -> list[Any]:
    """Return inputs of a model that are not random.

    Args:
        source: the model.
        number: how many at most.
        data: a text: needed for a Hugging Face folder, else that of the run.

    Raises:
        InputError: there is no text, it is too short, or the model has batches of its own.
    """
    if source.kind == "own":
        if data is not None:
            raise InputError(f"{source.name} has batches of its own: leave out --data")
        return list(source.own_batches[:number])
    if source.kind == "run":
        return _with_all_masks(training_batches(source.settings, number, data=data))
    return _texts(source, number, data)


def _texts(source: ModelSource, number: int, data: str | None) -> list[Any]:
    check_reads_text(source.model, Path(source.name))
    if data is None:
        raise InputError(f"{source.name} comes without a text: give one, --data TEXT")
    tokenizer = load_tokenizer(Path(source.name))
    texts = load_corpus(data).documents["train"][: number * _ROWS]
    batches = Pretrained(source.model, tokenizer, ()).batches(texts, _ROWS, _LENGTH)
    if not batches:
        raise InputError(
            f"{data} holds {len(texts)} documents to take, fewer than the {_ROWS} of a batch: "
            "give more text"
        )
    return list(batches)


def _with_all_masks(batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return batches with the masks of all of them: one of nothing may be left out."""
    masks = dict.fromkeys(name for batch in batches for name in batch if name.endswith(MASK))
    return [
        {**{name: _no_padding(batch, name) for name in masks}, **batch} if masks else batch
        for batch in batches
    ]


def _no_padding(batch: Mapping[str, Tensor], mask: str) -> Tensor:
    tokens = batch[mask.removesuffix(MASK).rstrip("_") or "tokens"]
    return torch.zeros(tokens.shape[:2], dtype=torch.bool)
