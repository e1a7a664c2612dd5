"""Batches of sentence pairs within a budget of tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.corpus import EvaluatedSplit, Split
from powernorm_lab.data.orders import LengthGroups, WithinBudget, spaced, spaced_by_tokens
from powernorm_lab.tasks.translation.data import EncodedPairs, EncodedPairSplit
from powernorm_lab.tasks.translation.scores import corpus_bleu, corpus_scores
from powernorm_lab.tasks.translation.search import translate_split
from powernorm_lab.tasks.translation.settings import TranslationSettings
from powernorm_lab.training.batches import RunData

NUM_SCORED: Final = 500
"""Number of evenly spaced pairs that a validation translates."""
_PAIR_SEED: Final = 1 << 20
"""Offset of the seed of the pairs, so that it differs from that of the batches."""


def training_pairs(
    split: EncodedPairSplit,
    *,
    batch_tokens: int,
    seed: int,
    batches_per_update: int,
) -> TrainingBatches:
    """Return the batches of a training run, with pairs of similar length in a batch.

    Every epoch shuffles the batches, and the pairs of equal lengths.

    Args:
        split: split to train on.
        batch_tokens: maximal number of positions of the longer side of a batch, including padding,
            over all processes.
        seed: seed of the shuffling.
        batches_per_update: micro-batches over which the gradient is summed.

    Raises:
        InputError: a pair has more than `batch_tokens` subwords.
    """
    source_lengths, target_lengths = split.source.lengths, split.target.lengths
    longest = int(torch.maximum(source_lengths, target_lengths).max())
    if longest > batch_tokens:
        raise InputError(
            f"data.batch_tokens={batch_tokens} is less than the {longest} subwords of the "
            "longest training pair: raise it, or lower data.sequence_length"
        )
    groups = LengthGroups(source_lengths, target_lengths, batch_tokens=batch_tokens)
    return TrainingBatches(
        WithinBudget(groups, seed=seed, row_seed=_PAIR_SEED + seed),
        lambda rows, _: pair_batch(split, rows),
        tokens_per_batch=int(source_lengths.sum() + target_lengths.sum()) / len(groups),
        num_targets=lambda rows: int(target_lengths[rows].sum()),
        batches_per_update=batches_per_update,
    )


def evaluation_pairs(
    split: EncodedPairSplit, *, batch_tokens: int, max_tokens: int | None = None
) -> EvaluationBatches:
    """Return the batches of an evaluation, sorted by length.

    Args:
        split: split to evaluate.
        batch_tokens: maximal number of positions of the longer side of a batch, including padding;
            a longer pair is a batch by itself.
        max_tokens: approximate number of targets, in evenly spaced pairs; None is all.
    """
    chosen = spaced_by_tokens(split.target.lengths, max_tokens)
    groups = LengthGroups(
        split.source.lengths[chosen],
        split.target.lengths[chosen],
        batch_tokens=batch_tokens,
    )
    parts = [chosen[part] for part in groups.batches()]
    return EvaluationBatches(parts, lambda rows, _: pair_batch(split, rows))


def pair_batch(split: EncodedPairSplit, rows: Tensor) -> Batch:
    """Return a batch of pairs by number: source, shifted translation, and targets.

    The model reads each source with its end mark, and each translation with the end mark in front.
    The targets are the translation followed by the end mark. A side without padding has no mask.
    """
    source, source_mask = split.source.padded(rows)
    targets, target_mask = split.target.padded(rows)
    num_targets = int(split.target.lengths[rows].sum())
    named = {"source": source, "target": split.target.shifted(rows)}
    if source_mask is not None:
        named["source_padding_mask"] = source_mask
    if target_mask is not None:
        named["target_padding_mask"] = target_mask
    return Batch(
        named=named,
        targets=targets if target_mask is None else targets.masked_fill_(target_mask, IGNORED),
        num_tokens=int(split.source.lengths[rows].sum()) + num_targets,
        num_targets=num_targets,
        positional=("source", "target"),
        is_cut=True,
    )


class TranslationData(RunData[TranslationSettings]):
    """Batches of sentence pairs; the targets are the subwords of the translation.

    Args:
        encoded: the encoded pairs.
        config: budget of tokens and number of steps.
        seed: seed of the order.

    Raises:
        InputError: a pair is longer than a batch.
    """

    def __init__(self, encoded: EncodedPairs, config: TranslationSettings, seed: int) -> None:
        pairs = training_pairs(
            encoded.splits["train"],
            batch_tokens=config.data.batch_tokens,
            seed=seed,
            batches_per_update=config.optimizer.accumulation,
        )
        super().__init__(config, pairs)
        self._encoded = encoded

    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of a split, all or about `max_tokens` targets."""
        return evaluation_pairs(
            self._encoded.splits[split],
            batch_tokens=self._config.data.batch_tokens,
            max_tokens=max_tokens,
        )

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return chrF and the forms of BLEU of a split's translations; only BLEU if `brief`.

        Args:
            split: split to translate.
            model: translation model.
            device: device of the model.
            brief: translate only about `NUM_SCORED` pairs, greedily.
        """
        config, encoded = self._config, self._encoded
        if not brief:
            whole = translate_split(model, encoded, split, config.decoding, device)
            found = corpus_scores(whole.translations, whole.references, encoded.corpus).metrics
            return {
                name.removeprefix("test_"): value
                for name, value in found.items()
                if value is not None
            }
        part = translate_split(
            model,
            encoded,
            split,
            replace(config.decoding, beam_size=1),
            device,
            rows=spaced(len(encoded.splits[split]), NUM_SCORED),
        )
        return {"bleu": corpus_bleu(part.translations, part.references, encoded.corpus)}
