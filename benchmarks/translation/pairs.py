"""The sentence pairs that both sides train on and translate: the embedded verses."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
from joeynmt_files import SOURCE, TARGET, write_pairs, write_vocabulary
from shapes import Search, Shape

from powernorm_lab.data.batch import Batch, TrainingBatches
from powernorm_lab.tasks.translation.batches import pair_batch
from powernorm_lab.tasks.translation.batches import training_pairs as pairs_of
from powernorm_lab.tasks.translation.data import (
    EncodedPairs,
    EncodedPairSplit,
    PairOptions,
    encode_pairs,
)
from powernorm_lab.tasks.translation.sources import load_pairs

TRAINING_SEED = 0
NUM_VALID = 8
"""Pairs that are scored after a run, which is not timed."""


def write_text(folder: Path, search: Search) -> None:
    """The verses as text: all for training, few for what comes after the timed updates."""
    folder.mkdir(parents=True, exist_ok=True)
    verses = load_pairs("verses", f"{SOURCE}-{TARGET}", tokenized=False)
    test = list(verses.pairs("test"))
    spaced = [test[i * len(test) // search.num_sentences] for i in range(search.num_sentences)]
    _write(folder, "train", verses.pairs("train"))
    _write(folder, "valid", islice(verses.pairs("valid"), NUM_VALID))
    _write(folder, "test", spaced)


def _write(folder: Path, split: str, pairs: Iterable[tuple[str, str]]) -> None:
    sources, targets = zip(*pairs, strict=True)
    (folder / f"{split}.{SOURCE}").write_text("".join(f"{line}\n" for line in sources))
    (folder / f"{split}.{TARGET}").write_text("".join(f"{line}\n" for line in targets))


def open_pairs(folder: Path, shape: Shape) -> EncodedPairs:
    """The text over its subwords; from the cache but for the first time."""
    corpus = load_pairs(str(folder), f"{SOURCE}-{TARGET}", tokenized=False)
    options = PairOptions(vocabulary_size=shape.vocabulary_size, max_length=shape.max_length)
    return encode_pairs(corpus, options)


def training_pairs(encoded: EncodedPairs, shape: Shape) -> TrainingBatches:
    """The batches that a run of `powernorm compare` has with this seed."""
    return pairs_of(
        encoded.splits["train"],
        batch_tokens=shape.batch_tokens,
        seed=TRAINING_SEED,
        batches_per_update=1,
    )


def test_batch(encoded: EncodedPairs, search: Search) -> Batch:
    """The sentences that are translated, in their order, as one batch."""
    split = encoded.splits["test"]
    rows = torch.arange(len(split))
    assert len(rows) == search.num_sentences
    return pair_batch(split, rows)


def write_for_joeynmt(
    folder: Path, encoded: EncodedPairs, shape: Shape, num_batches: int
) -> list[int]:
    """Writes the subwords of all splits, and of the first training batches on their own.

    Returns:
        Pairs in each of these batches, which are one after the other in `batched`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_vocabulary(folder, encoded.vocabulary_size)
    for split, part in encoded.splits.items():
        write_pairs(folder, split, _pairs_of_split(part))
    batches = training_pairs(encoded, shape)
    chosen = [batches.batch(position) for position in range(num_batches)]
    write_pairs(folder, "batched", (pair for batch in chosen for pair in _pairs_of_batch(batch)))
    return [len(batch.named["source"]) for batch in chosen]


def _pairs_of_split(split: EncodedPairSplit) -> Iterable[tuple[list[int], list[int]]]:
    for row in range(len(split)):
        yield split.source.row(row)[:-1].tolist(), split.target.row(row)[:-1].tolist()


def _pairs_of_batch(batch: Batch) -> Iterable[tuple[list[int], list[int]]]:
    # No subword has the number of the end mark, which is also what padding is filled with.
    for source, targets in zip(batch.named["source"].tolist(), batch.targets.tolist(), strict=True):
        yield [token for token in source if token > 0], [token for token in targets if token > 0]
