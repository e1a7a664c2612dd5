"""The diagnosis of a pretrained model in a folder of Hugging Face's layout, on a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from powernorm.data.readers import load_corpus
from powernorm.diagnosis import Diagnosis, diagnose
from powernorm.errors import InputError
from powernorm.inspection.batches import Progress

CONFIG: Final = "config.json"
TYPE: Final = "model_type"
DEFAULT_TEXT: Final = "rt"
"""Sentences: documents of a length that a batch is made of."""


def is_pretrained(path: Path) -> bool:
    """Whether a folder has a configuration of Hugging Face's (a run's has no model type)."""
    file = path / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and TYPE in found


def diagnose_pretrained(
    path: Path,
    *,
    data: str | None = None,
    num_batches: int = 50,
    batch_size: int = 32,
    length: int = 128,
    on_progress: Progress | None = None,
) -> Diagnosis:
    """Diagnose a pretrained model on a text.

    Args:
        path: a folder with config.json, weights and tokenizer.
        data: the text, as `--data` takes it; None is the embedded film review sentences.
        num_batches: batches in each pass, ≥ 2.
        batch_size: documents of the train split in a batch.
        length: tokens of a document at most.
        on_progress: see `powernorm.diagnose`.

    Raises:
        InputError: the model, its tokenizer or the text cannot be read, or the text is too short.
    """
    if num_batches < 2:
        raise InputError(f"num_batches is {num_batches}, expected at least 2: TID compares batches")
    documents = load_corpus(data or DEFAULT_TEXT).documents["train"]
    model, tokenizer, missing = _load(path)
    length = min(length, _longest(model, tokenizer))
    batches = _batches(tokenizer, documents[: num_batches * batch_size], batch_size, length)
    if len(batches) < 2:
        raise InputError(
            f"{data or DEFAULT_TEXT} has {len(documents)} documents to train on, fewer than two "
            f"batches of {batch_size}: give more text or a smaller --sequences"
        )
    if model.config.is_encoder_decoder:
        batches = [
            {
                **batch,
                "decoder_input_ids": batch["input_ids"],
                "decoder_attention_mask": batch["attention_mask"],
            }
            for batch in batches
        ]
    report = diagnose(model, batches, on_progress=on_progress)
    notes = list(report.notes)
    if missing:
        notes.append(
            f"the folder has no weights for {', '.join(missing[:3])}"
            f"{' and others' if len(missing) > 3 else ''}: random ones stand there"
        )
    name = f"{type(model).__name__} in {path.resolve().name}"
    return replace(report, model=name, notes=tuple(notes))


def _longest(model: Any, tokenizer: Any) -> int:
    """How many tokens the model takes; what it does not say is no limit."""
    limits = [tokenizer.model_max_length]
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        # RoBERTa's and its relatives' first positions are those of the padding.
        offset = (model.config.pad_token_id or 0) + 1 if "roberta" in model.config.model_type else 0
        limits.append(positions - offset)
    return int(min(limits))


def _load(path: Path) -> tuple[Any, Any, list[str]]:
    """Model, tokenizer, and the names of weights that the folder does not have."""
    try:
        from transformers import AutoModel, AutoTokenizer
    except ModuleNotFoundError as error:
        raise InputError(
            "a Hugging Face model needs the package transformers: pip install 'powernorm[hf]'"
        ) from error
    try:
        model, info = AutoModel.from_pretrained(
            str(path), local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # whatever a damaged folder makes the library raise
        raise InputError(
            f"{path} holds no model and tokenizer that can be loaded: {type(error).__name__}: "
            f"{error}"
        ) from error
    if tokenizer.pad_token is None:
        # GPT-2 and its like were trained without padding; the mask says what is none.
        anything = tokenizer.eos_token or tokenizer.unk_token
        tokenizer.pad_token = anything or tokenizer.convert_ids_to_tokens(0)
    return model.eval(), tokenizer, sorted(info["missing_keys"])


def _batches(
    tokenizer: Any, documents: Sequence[str], batch_size: int, length: int
) -> list[dict[str, Tensor]]:
    batches = []
    for first in range(0, len(documents) - batch_size + 1, batch_size):
        encoded = tokenizer(
            list(documents[first : first + batch_size]),
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        batches.append(
            {
                "input_ids": encoded["input_ids"],
                "attention_mask": encoded["attention_mask"].to(torch.long),
            }
        )
    return batches
