"""Padded batches of sentences in which every word is asked for its tag."""

from torch import Tensor

from powernorm.lab.data.batch import IGNORED, MASK, Batch
from powernorm.lab.data.orders import Order, ShuffledByLength
from powernorm.lab.data.rows import PaddedRows
from powernorm.lab.tasks.ner.encoding import PADDING_ID, EncodedSentences


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

    def batch(self, rows: Tensor) -> Batch:
        """Return rows by number, padded to the longest."""
        places, padding = self.places(rows)
        num_words = int(self.lengths[rows].sum())
        named = {
            "tokens": self._sentences.words[places].long().masked_fill(padding, PADDING_ID),
            MASK: padding,
        }
        if self._has_characters:
            named["characters"] = self._characters(places, padding)
        return Batch(
            named=named,
            targets=self._sentences.tags[places].long().masked_fill(padding, IGNORED),
            num_tokens=num_words,
            num_targets=num_words,
            # The minimized loss is a mean over sentences, the one that is logged over words.
            loss_targets=float(rows.numel()),
            logged_targets=float(num_words),
        )

    def _characters(self, places: Tensor, padding: Tensor) -> Tensor:
        found = self._sentences.characters[places].long()
        found = found.masked_fill(padding[..., None], PADDING_ID)
        longest = int((found != PADDING_ID).any(dim=0).any(dim=0).sum())
        return found[..., : max(longest, 1)]
