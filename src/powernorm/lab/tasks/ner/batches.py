"""Padded batches of sentences in which every word is asked for its tag."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.lab.data.batch import IGNORED
from powernorm.lab.data.orders import Order, ShuffledByLength
from powernorm.lab.data.rows import PaddedRows
from powernorm.lab.tasks.ner.encoding import PADDING_ID, EncodedSentences


class SentenceBatch(NamedTuple):
    """Sentences and the tag of each word."""

    tokens: Tensor
    """int64, (batch, length): ids of words."""
    characters: Tensor | None
    """int64, (batch, length, characters of the longest word); None for a model without them."""
    targets: Tensor
    """int64, (batch, length): ids of tags, `IGNORED` at padding, which is at the end of a row."""
    padding_mask: Tensor
    """bool, (batch, length), True = padding."""
    num_tokens: int
    """Words."""
    num_targets: int
    """Words, too."""
    loss_targets: float | None = None
    """Sentences: what the summed loss is divided by."""
    word_share: float | None = None
    """What the loss that is logged is divided by; None is `num_targets`."""

    @property
    def logged_targets(self) -> float:
        """Return the words over which the logged loss is a mean.

        A process that has a part of the batch divides by its share of all, as it does with
        `loss_targets`.
        """
        return self.word_share or self.num_targets

    def inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's forward."""
        named = {"tokens": self.tokens, "padding_mask": self.padding_mask}
        return named if self.characters is None else {**named, "characters": self.characters}

    def to(self, device: torch.device) -> "SentenceBatch":
        """Return the batch on a device."""
        return self._replace(
            tokens=self.tokens.to(device),
            characters=None if self.characters is None else self.characters.to(device),
            targets=self.targets.to(device),
            padding_mask=self.padding_mask.to(device),
        )

    def shard(self, rank: int, size: int) -> "SentenceBatch":
        """Return the sentences of one of `size` processes: those from `rank` in steps of `size`.

        A process without any gets one of padding alone, so that it calls every layer, and every
        exchange of statistics, as often as the others.
        """
        is_empty = len(self.tokens) <= rank
        rows = slice(0, 1) if is_empty else slice(rank, None, size)
        targets, mask = self.targets[rows], self.padding_mask[rows]
        if is_empty:
            targets, mask = torch.full_like(targets, IGNORED), torch.ones_like(mask)
        num_words = int((~mask).sum())
        return SentenceBatch(
            tokens=self.tokens[rows],
            characters=None if self.characters is None else self.characters[rows],
            targets=targets,
            padding_mask=mask,
            num_tokens=num_words,
            num_targets=num_words,
            loss_targets=(self.loss_targets or len(self.tokens)) / size,
            word_share=self.logged_targets / size,
        )

    def joined_with(self, others: Sequence["SentenceBatch"]) -> "SentenceBatch":
        """Return one batch of all sentences, padded to the longest."""
        parts = [self, *others]
        length = max(part.tokens.shape[1] for part in parts)
        characters = [part.characters for part in parts if part.characters is not None]
        num_words = sum(part.num_tokens for part in parts)
        return SentenceBatch(
            tokens=_stacked([part.tokens for part in parts], length, PADDING_ID),
            characters=_stacked_characters(characters, length) if characters else None,
            targets=_stacked([part.targets for part in parts], length, IGNORED),
            padding_mask=_stacked([part.padding_mask for part in parts], length, True),
            num_tokens=num_words,
            num_targets=num_words,
            loss_targets=float(sum(len(part.tokens) for part in parts)),
        )


def _stacked(parts: Sequence[Tensor], length: int, filling: int) -> Tensor:
    return torch.cat([F.pad(part, (0, length - part.shape[1]), value=filling) for part in parts])


def _stacked_characters(parts: Sequence[Tensor], length: int) -> Tensor:
    width = max(part.shape[2] for part in parts)
    return torch.cat(
        [
            F.pad(part, (0, width - part.shape[2], 0, length - part.shape[1]), value=PADDING_ID)
            for part in parts
        ]
    )


class TaggedRows(PaddedRows):
    """The sentences of a split with the tag of each word.

    Args:
        sentences: the split.
        has_characters: whether batches hold the words' characters.
    """

    unit = "sentences"

    def __init__(self, sentences: EncodedSentences, *, has_characters: bool) -> None:
        super().__init__(sentences.lengths)
        self._sentences = sentences
        self._has_characters = has_characters

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the order of a training: sentences of about the same length together."""
        return ShuffledByLength(self.lengths, batch_size=batch_size, seed=seed, unit=self.unit)

    def batch(self, rows: Tensor) -> SentenceBatch:
        """Return rows by number, padded to the longest."""
        places, padding = self.places(rows)
        num_words = int(self.lengths[rows].sum())
        return SentenceBatch(
            tokens=self._sentences.words[places].long().masked_fill(padding, PADDING_ID),
            characters=self._characters(places, padding) if self._has_characters else None,
            targets=self._sentences.tags[places].long().masked_fill(padding, IGNORED),
            padding_mask=padding,
            num_tokens=num_words,
            num_targets=num_words,
            loss_targets=float(rows.numel()),
        )

    def _characters(self, places: Tensor, padding: Tensor) -> Tensor:
        found = self._sentences.characters[places].long()
        found = found.masked_fill(padding[..., None], PADDING_ID)
        longest = int((found != PADDING_ID).any(dim=0).any(dim=0).sum())
        return found[..., : max(longest, 1)]
