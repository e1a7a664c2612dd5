"""Writes what Joey NMT reads: subword ids as words, its vocabulary and its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shapes import Search, Shape

SOURCE, TARGET = "de", "en"
VOCABULARY = "subwords.txt"
Pair = tuple[Sequence[int], Sequence[int]]
"""Source and target subwords, without end marks."""


def write_pairs(folder: Path, name: str, pairs: Iterable[Pair]) -> None:
    """One sentence a line, the ids being its words."""
    kept = list(pairs)
    for place, side in enumerate((SOURCE, TARGET)):
        with (folder / f"{name}.{side}").open("w") as file:
            for pair in kept:
                print(*pair[place], file=file)


def write_vocabulary(folder: Path, size: int) -> None:
    """All ids but the end mark, 0, for which Joey NMT has four marks of its own."""
    (folder / VOCABULARY).write_text("".join(f"{number}\n" for number in range(1, size)))


def write_config(
    path: Path, data: Path, shape: Shape, *, train: str, num_updates: int, search: Search
) -> None:
    """Writes a configuration; JSON is YAML, as long as no number needs an exponent.

    Args:
        path: path of the file; the run's folder is next to it.
        data: folder of the sentences.
        shape: the model.
        train: name of the training sentences.
        num_updates: after which training ends.
        search: the beam search.
    """
    config = {
        "name": shape.name,
        "joeynmt_version": "2.3.0",
        "model_dir": str(path.with_suffix("")),
        "use_cuda": False,
        "random_seed": 0,
        "data": _data(data, train, shape),
        "model": _model(shape),
        "training": _training(shape, num_updates),
        "testing": _testing(search),
    }
    path.write_text(json.dumps(config, indent=2))


def _data(folder: Path, train: str, shape: Shape) -> dict[str, Any]:
    side = {
        "level": "word",
        "voc_file": str(folder / VOCABULARY),
        # Joey NMT counts without the end mark.
        "max_length": shape.max_length - 1,
    }
    return {
        "train": str(folder / train),
        "dev": str(folder / "valid"),
        "test": str(folder / "test"),
        "dataset_type": "plain",
        "src": {"lang": SOURCE, **side},
        "trg": {"lang": TARGET, **side},
    }


def _model(shape: Shape) -> dict[str, Any]:
    half = {
        "type": "transformer",
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "embeddings": {
            "embedding_dim": shape.num_features,
            "scale": True,
            "dropout": shape.dropout,
        },
        "hidden_size": shape.num_features,
        "ff_size": shape.feedforward_features,
        "dropout": shape.dropout,
        "layer_norm": "pre",
        "activation": "relu",
    }
    return {
        "initializer": "xavier_uniform",
        "tied_embeddings": True,
        "tied_softmax": True,
        "encoder": half,
        "decoder": half,
    }


def _training(shape: Shape, num_updates: int) -> dict[str, Any]:
    return {
        "optimizer": "adam",
        "adam_betas": [0.9, 0.98],
        "learning_rate": shape.learning_rate,
        "learning_rate_min": 0.0,
        "learning_rate_warmup": 4000,
        # Its default, `plateau`, hands torch an argument that it no longer takes.
        "scheduling": "warmupinversesquareroot",
        "clip_grad_norm": 1.0,
        "weight_decay": 0.0,
        "label_smoothing": shape.label_smoothing,
        "normalization": "tokens",
        "batch_type": "token",
        "batch_size": shape.batch_tokens,
        "shuffle": True,
        "epochs": 1,
        "updates": num_updates,
        "logging_freq": 10,
        # Never: only updates are timed.
        "validation_freq": 1_000_000,
        "keep_best_ckpts": 1,
        "overwrite": True,
    }


def _testing(search: Search) -> dict[str, Any]:
    return {
        "beam_size": search.beam_size,
        "beam_alpha": search.length_penalty,
        "max_output_length": search.length,
        "min_output_length": search.length,
        "batch_size": search.num_sentences,
        "batch_type": "sentence",
        "eval_metrics": [],
    }
