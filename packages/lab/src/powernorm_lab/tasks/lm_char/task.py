"""The task of language modeling over bytes with a Transformer-XL."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from powernorm_lab.data.corpus import EVALUATED_SPLITS, SPLITS
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.lm_char.data import (
    FIRST,
    VOCABULARY_SIZE,
    CharacterData,
    EncodedBytes,
    load_bytes,
)
from powernorm_lab.tasks.lm_char.model import TransformerXL
from powernorm_lab.tasks.lm_char.settings import CharacterSettings
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import UPPER_NORM, norm_factory, norm_options
from powernorm_lab.training.task import BuiltinTask, Sizes


class CharacterTask(BuiltinTask[EncodedBytes, CharacterSettings]):
    """Language modeling over bytes."""

    name = "lm-char"
    units = "bytes"
    metrics = ("valid_bits_per_character", "test_bits_per_character")
    data = CharacterData

    def encode(self, config: CharacterSettings, source: str | None = None) -> EncodedBytes:
        """Read the text of `data.path`, or `source`; the vocabulary is always the same."""
        return load_bytes(config.data.path if source is None else source)

    def baselines(self, encoded: EncodedBytes, config: CharacterSettings) -> list[Baseline]:
        """Return the scores of unigram, bigram and trigram models."""
        del config
        return [
            Baseline(name=name, metrics=metrics) for name, metrics in byte_metrics(encoded).items()
        ]

    def facts(self, encoded: EncodedBytes) -> dict[str, Any]:
        """Return name, source, license and sizes of the text."""
        return {
            "name": encoded.name,
            "source": encoded.source,
            "licence": encoded.license,
            "vocabulary_size": VOCABULARY_SIZE,
            "splits": {split: {"bytes": encoded.splits[split].numel()} for split in SPLITS},
        }

    def summary(self, encoded: EncodedBytes) -> DataPrepared:
        """Return the event that describes the data."""
        return DataPrepared(encoded.name, encoded.splits["train"].numel(), "bytes", VOCABULARY_SIZE)

    def sizes(self, encoded: EncodedBytes) -> Sizes:
        """Return the number of distinct bytes."""
        del encoded
        return (VOCABULARY_SIZE,)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the number of ids from the weights of a model."""
        return (len(weights["embedding.weight"]),)

    def build(self, config: CharacterSettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms.

        Without `model.memory_length` the memory is as long as a segment. Longer distances than in
        training, which occur with a longer memory in evaluation, are clamped to the longest one.

        Raises:
            InputError: the norm is unknown, or its options do not fit it or the model.
        """
        shape, length = config.model, config.data.sequence_length
        memory_length = length if shape.memory_length is None else shape.memory_length
        return TransformerXL(
            sizes[-1],
            norm_factory(norm, options_of(config, norm)),
            shape.shape,
            memory_length=memory_length,
            evaluation_memory_length=shape.evaluation_memory_length,
            num_lanes=config.optimizer.accumulation,
            max_distance=memory_length + length - 1,
            seed=seed,
            upper_norm=norm_factory(UPPER_NORM),
        )

    def example_inputs(self, config: CharacterSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return random bytes, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        return (torch.randint(sizes[-1], shape, generator=generator),)

    def check(self, config: CharacterSettings, norm: str) -> None:
        """Check the settings and the norm's options.

        Raises:
            InputError: a setting or option does not fit.
        """
        super().check(config, norm)
        norm_options(config, norm, config.model.norm_widths)


# Baselines: unigram, bigram and trigram models of bytes.


ORDERS: Final = ("unigram", "bigram", "trigram")
_CHUNK: Final = 1 << 20
"""Number of bytes processed at a time: int64 ids take eight times the memory of the text."""
_NUM_STEPS: Final = 100
_LEAST: Final = 1e-9
"""Minimal weight: the test split may need an order that the valid split did not."""
_FITTED_ON: Final = 1 << 20
"""Number of bytes of the valid split on which the weights are fitted."""


class ByteCounts:
    """Interpolated n-gram models of bytes up to trigrams.

    p(c | a b) = w₃ · count(a b c) / count(a b ·) + w₂ · count(b c) / count(b ·) + w₁ · p(c), where
    p(c) = (count(c) + 1) / (length + 256). The weights sum to 1 and maximize the likelihood of the
    valid split, by expectation maximization. After bytes that never occurred in training, terms
    without a count are omitted and the other weights are rescaled; such positions are not used to
    fit the weights.

    Args:
        train: the train split, uint8, (number of bytes,).
        valid: the valid split, for the weights.
    """

    def __init__(self, train: Tensor, valid: Tensor) -> None:
        self._counts = _counts(train)
        # Not the counts of the lower order, which include the last byte and not the context before
        # the first byte.
        self._contexts = [table.view(-1, VOCABULARY_SIZE).sum(1) for table in self._counts]
        self.weights = {order: self._fit(valid[:_FITTED_ON], order) for order in (1, 2, 3)}
        """Weights by order, the shortest context first."""

    def nll(self, text: Tensor, order: int) -> float:
        """Return the negative log-likelihood of a text in nats.

        Args:
            text: uint8, (number of bytes,).
            order: 1, 2 or 3 bytes, including the predicted one.
        """
        weights = self.weights[order]
        total = 0.0
        for ids in _triples(text):
            total -= float(_mixed(weights, *self._parts(ids, order)).log().sum())
        return total

    def _parts(self, triples: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """Return the estimate of each order, and whether its context is known, (order, bytes)."""
        single = self._counts[0].double() + 1
        estimates = [(single / single.sum())[triples % VOCABULARY_SIZE]]
        known = [torch.ones_like(triples, dtype=torch.bool)]
        for number in range(1, order):
            table = self._counts[number]
            ids = triples % VOCABULARY_SIZE ** (number + 1)
            contexts = self._contexts[number][ids // VOCABULARY_SIZE]
            estimates.append(table[ids].double() / contexts.clamp(min=1))
            known.append(contexts > 0)
        return torch.stack(estimates), torch.stack(known)

    def _fit(self, text: Tensor, order: int) -> Tensor:
        weights = torch.full((order,), 1 / order, dtype=torch.float64)
        if order == 1 or not text.numel():
            return weights
        ids = torch.cat(list(_triples(text)))
        estimates, known = self._parts(ids, order)
        estimates = estimates[:, known.all(0)]
        if not estimates.numel():
            return weights
        for _ in range(_NUM_STEPS):
            shares = weights[:, None] * estimates
            weights = (shares / shares.sum(0)).mean(1)
        return weights.clamp(min=_LEAST)


def _mixed(weights: Tensor, estimates: Tensor, known: Tensor) -> Tensor:
    shares = weights[:, None] * known
    return (shares / shares.sum(0) * estimates).sum(0)


def byte_metrics(encoded: EncodedBytes) -> dict[str, dict[str, float | None]]:
    """Return loss (nats per byte), perplexity and bits per character of the valid and test splits.

    Returns:
        Metrics of the unigram, bigram and trigram model.
    """
    counts = ByteCounts(encoded.splits["train"], encoded.splits["valid"])
    metrics: dict[str, dict[str, float | None]] = {name: {} for name in ORDERS}
    for order, name in enumerate(ORDERS, start=1):
        for split in EVALUATED_SPLITS:
            text = encoded.splits[split]
            loss = counts.nll(text, order) / text.numel()
            metrics[name][f"{split}_perplexity"] = math.exp(loss)
            metrics[name][f"{split}_loss"] = loss
            metrics[name][f"{split}_bits_per_character"] = loss / math.log(2)
    return metrics


def _counts(text: Tensor) -> list[Tensor]:
    """Return the counts of single bytes, pairs and triples, the last byte varying fastest."""
    triples = torch.zeros(VOCABULARY_SIZE**3, dtype=torch.int32)
    for ids in _triples(text):
        triples.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    pairs = triples.view(VOCABULARY_SIZE, -1).sum(0)
    return [pairs.view(VOCABULARY_SIZE, -1).sum(0), pairs, triples]


def _triples(text: Tensor) -> Iterator[Tensor]:
    """Yield chunks of the text with each byte and the two before it as one number, int64."""
    for first in range(0, text.numel(), _CHUNK):
        ids = text[max(first - 2, 0) : first + _CHUNK].long()
        missing = max(2 - first, 0)
        if missing:
            ids = torch.cat([ids.new_full((missing,), FIRST), ids])
        yield (ids[:-2] * VOCABULARY_SIZE + ids[1:-1]) * VOCABULARY_SIZE + ids[2:]
