"""Padded batches of sentences in which every word is asked for its tag."""

from torch import Tensor

from powernorm.lab.data.batch import IGNORED, MASK, Batch
from powernorm.lab.data.rows import DocumentRows
from powernorm.lab.data.subwords import END_ID


class TaggedSentences(DocumentRows):
    """Sentences and the tag of each word.

    Args:
        words: the stream, every sentence followed by the end mark, (num_tokens,).
        tags: of each word, `IGNORED` at end marks, (num_tokens,).
        length: words in a row at most; a longer sentence makes several rows.
    """

    def __init__(self, words: Tensor, tags: Tensor, *, length: int) -> None:
        super().__init__(words, length)
        self._words = words
        self._tags = tags

    def batch(self, rows: Tensor) -> Batch:
        """Return rows by number, padded to the longest."""
        places, padding = self.places(rows)
        num_tokens = int((~padding).sum())
        return Batch(
            named={
                "tokens": self._words[places].long().masked_fill(padding, END_ID),
                MASK: padding,
            },
            targets=self._tags[places].long().masked_fill(padding, IGNORED),
            num_tokens=num_tokens,
            num_targets=num_tokens,
        )
