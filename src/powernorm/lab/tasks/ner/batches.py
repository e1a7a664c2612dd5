"""Padded batches of sentences in which every word is asked for its tag."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.batch import IGNORED
from powernorm.lab.tasks.ner.encoding import PADDING_ID, EncodedSentences

SEED_STRIDE: Final = 1_000_003
"""Between the orders of two seeds; an epoch more is one more."""
BUCKET: Final = 32
"""Batches' worth of shuffled rows that are sorted by length before they are cut into batches."""


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


class SentenceRows:
    """Cuts batches out of a split by the numbers of its rows.

    Args:
        sentences: the split.
        has_characters: whether batches hold the words' characters.
    """

    def __init__(self, sentences: EncodedSentences, *, has_characters: bool) -> None:
        self.lengths = sentences.lengths
        self._starts = self.lengths.cumsum(0) - self.lengths
        self._sentences = sentences
        self._has_characters = has_characters

    def __len__(self) -> int:
        return self.lengths.numel()

    def batch(self, rows: Tensor) -> SentenceBatch:
        """Return rows as a batch.

        Args:
            rows: numbers of at least one row, int64, (batch,).
        """
        lengths = self.lengths[rows]
        positions = torch.arange(int(lengths.max()))
        padding = positions >= lengths[:, None]
        places = (self._starts[rows][:, None] + positions).masked_fill(padding, 0)
        num_words = int(lengths.sum())
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


class TrainingSentences:
    """The batches of a training run, in an order that seed and position determine.

    Each epoch shuffles the rows, sorts each `BUCKET` batches of them by length, so that little is
    padded, cuts them into batches and shuffles these. What does not fill a batch waits for the
    next epoch.

    Args:
        sentences: the train split.
        batch_size: rows in a batch.
        seed: of the order.
        has_characters: whether batches hold the words' characters.

    Raises:
        InputError: there are fewer rows than a batch has.
    """

    def __init__(
        self, sentences: EncodedSentences, *, batch_size: int, seed: int, has_characters: bool
    ) -> None:
        self._rows = SentenceRows(sentences, has_characters=has_characters)
        if len(self._rows) < batch_size:
            raise InputError(
                f"The train split has {len(self._rows)} sentences, fewer than a batch of "
                f"{batch_size}: lower data.batch_size."
            )
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._batches: Sequence[Tensor] = ()

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the text begins anew."""
        return len(self._rows) // self._batch_size

    @property
    def tokens_per_batch(self) -> float:
        """Return the mean number of words in a batch."""
        return float(self._rows.lengths.double().mean()) * self._batch_size

    def batch(self, position: int) -> SentenceBatch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        epoch, index = divmod(position, self.batches_per_epoch)
        if epoch != self._epoch:
            self._batches = self._shuffled(epoch)
            self._epoch = epoch
        return self._rows.batch(self._batches[index])

    def _shuffled(self, epoch: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self._seed * SEED_STRIDE + epoch)
        order = torch.randperm(len(self._rows), generator=generator)
        batches = [
            batch
            for bucket in order[: self.batches_per_epoch * self._batch_size].split(
                BUCKET * self._batch_size
            )
            for batch in bucket[self._rows.lengths[bucket].argsort(stable=True)].split(
                self._batch_size
            )
        ]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


class EvaluationSentences:
    """The batches of an evaluation, in the order of the text.

    Args:
        sentences: the split.
        batch_size: rows in a batch.
        has_characters: whether batches hold the words' characters.
        max_tokens: only about so many words, in evenly spaced rows.
    """

    def __init__(
        self,
        sentences: EncodedSentences,
        *,
        batch_size: int,
        has_characters: bool,
        max_tokens: int | None = None,
    ) -> None:
        self._rows = SentenceRows(sentences, has_characters=has_characters)
        total = len(self._rows)
        kept = total
        if max_tokens is not None:
            kept = min(total, max(1, max_tokens * total // int(self._rows.lengths.sum())))
        self._chosen = torch.arange(kept) * total // kept
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self._chosen.numel() // self._batch_size)

    def __iter__(self) -> Iterator[SentenceBatch]:
        """Yield the batches."""
        yield from map(self._rows.batch, self._chosen.split(self._batch_size))
