"""Padded batches of sentences in which every word is asked for its tag."""

from collections.abc import Iterator

from torch import Tensor

from powernorm.lab.data.batch import IGNORED, Batch
from powernorm.lab.data.rows import Rows, ShuffledRows, SpacedRows
from powernorm.lab.data.subwords import END_ID


class TrainingTags:
    """The batches of a training run, in an order that seed and position determine.

    Args:
        words: the stream, every sentence followed by the end mark, (num_tokens,).
        tags: of each word, `IGNORED` at end marks, (num_tokens,).
        length: words in a row at most; a longer sentence makes several rows.
        batch_size: rows in a batch.
        seed: of the order.

    Raises:
        InputError: there are fewer rows than a batch has.
    """

    def __init__(
        self, words: Tensor, tags: Tensor, *, length: int, batch_size: int, seed: int
    ) -> None:
        self._words = words
        self._tags = tags
        self._rows = Rows(words, length)
        self._order = ShuffledRows(self._rows, batch_size=batch_size, seed=seed)

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches after which the text begins anew."""
        return self._order.batches_per_epoch

    @property
    def tokens_per_batch(self) -> float:
        """Return the mean number of words in a batch, padding left out."""
        return self._order.tokens_per_batch

    def batch(self, position: int) -> Batch:
        """Return the batch at `position`, counted from the start of the run over all epochs."""
        return _batch(self._words, self._tags, self._rows, self._order.at(position))


class EvaluationTags:
    """The batches of an evaluation, in the order of the text.

    Args:
        words: the stream, every sentence followed by the end mark, (num_tokens,).
        tags: of each word, `IGNORED` at end marks, (num_tokens,).
        length: words in a row at most.
        batch_size: rows in a batch.
        max_tokens: read only about so many words, in evenly spaced rows.
    """

    def __init__(
        self,
        words: Tensor,
        tags: Tensor,
        *,
        length: int,
        batch_size: int,
        max_tokens: int | None = None,
    ) -> None:
        self._words = words
        self._tags = tags
        self._rows = Rows(words, length)
        self._order = SpacedRows(self._rows, batch_size=batch_size, max_tokens=max_tokens)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._order)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in the order of the text."""
        for chosen in self._order:
            yield _batch(self._words, self._tags, self._rows, chosen)


def _batch(words: Tensor, tags: Tensor, rows: Rows, chosen: Tensor) -> Batch:
    places, padding = rows.places(chosen)
    num_tokens = int((~padding).sum())
    return Batch(
        tokens=words[places].long().masked_fill(padding, END_ID),
        targets=tags[places].long().masked_fill(padding, IGNORED),
        padding_mask=padding,
        num_tokens=num_tokens,
        num_targets=num_tokens,
    )
