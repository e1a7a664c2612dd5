"""Trained models by the name that commands take: a folder, a run, a checkpoint, `module:name`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.integrations.folded_pretrained import example_inputs, load_whole
from powernorm.integrations.pretrained import (
    Pretrained,
    check_reads_text,
    is_pretrained,
    load_tokenizer,
)
from powernorm.lab.data.batch import MASK
from powernorm.lab.data.readers import load_corpus
from powernorm.lab.own_models import ModelWithBatches, is_own_run, load_own_run, model_by_name
from powernorm.lab.tasks.trained_models import (
    is_folded,
    load_folded_run,
    load_trained,
    training_batches,
)

Kind = Literal["pretrained", "own", "run"]
_ROWS = 8
_LENGTH = 128


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A trained model.

    Attributes:
        kind: a Hugging Face folder, the user's own with its batches, or a run of `compare`.
        name: as it was given.
        model: in evaluation mode, on the CPU.
        example_inputs: of its forward, random but for the user's own.
        settings: of a run.
        own_batches: of the user's own model.
    """

    kind: Kind
    name: str
    model: nn.Module
    example_inputs: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    own_batches: Sequence[Any] = ()

    def batches(self, number: int, data: str | None = None) -> list[Any]:
        """Return inputs of the model that are not random.

        Args:
            number: how many at most.
            data: a text: needed for a Hugging Face folder, else that of the run.

        Raises:
            InputError: there is no text, it is too short, or the model has batches of its own.
        """
        if self.kind == "own":
            if data is not None:
                raise InputError(f"{self.name} has batches of its own: leave out --data")
            return list(self.own_batches[:number])
        if self.kind == "run":
            return _with_all_masks(training_batches(self.settings, number, data=data))
        return self._texts(number, data)

    def _texts(self, number: int, data: str | None) -> list[Any]:
        check_reads_text(self.model, Path(self.name))
        if data is None:
            raise InputError(f"{self.name} comes without a text: give one, --data TEXT")
        tokenizer = load_tokenizer(Path(self.name))
        texts = load_corpus(data).documents["train"][: number * _ROWS]
        batches = Pretrained(self.model, tokenizer, ()).batches(texts, _ROWS, _LENGTH)
        if not batches:
            raise InputError(
                f"{data} holds {len(texts)} documents to take, fewer than the {_ROWS} of a batch: "
                "give more text"
            )
        return list(batches)


def open_model(source: str) -> ModelSource:
    """Return a trained model.

    Args:
        source: a folder in Hugging Face's layout or one that `powernorm.save` wrote of such a
            model, a run's folder or checkpoint, a folder that `powernorm fold` or `remove` wrote of
            a run, or `module:name` of (model, batches).

    Raises:
        InputError: there is no such model, or it cannot be loaded.
    """
    path = Path(source)
    if ":" in source and not path.exists():
        return _own(source, model_by_name(source))
    if path.is_dir() and is_pretrained(path):
        model = load_whole(path)
        return ModelSource("pretrained", source, model, example_inputs(model))
    if is_own_run(path):
        return _own(source, load_own_run(path))
    trained = load_folded_run(path) if is_folded(path) else load_trained(path)
    return ModelSource("run", source, trained.model, trained.example_inputs(), trained.settings)


def _own(name: str, found: ModelWithBatches) -> ModelSource:
    return ModelSource("own", name, found.model, found.batches[0], own_batches=found.batches)


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
