"""Tagged sentences as the batches of a run: every word is asked for its tag."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from powernorm.lab.data.batch import IGNORED, MASK, Batch
from powernorm.lab.data.corpus import EvaluatedSplit, Split
from powernorm.lab.data.rows import DocumentRows
from powernorm.lab.data.subwords import END_ID
from powernorm.lab.tasks.tag.settings import TaggingSettings
from powernorm.lab.tasks.tag.tagged_words import EncodedTags
from powernorm.lab.training.batches import RowData


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


class TaggedSentenceData(RowData[TaggingSettings]):
    """Padded sentences, in which every word's part of speech is predicted from all words.

    Args:
        encoded: the treebank over its words and tags.
        config: lengths, sizes and number of steps.
        seed: of the order of the sentences.

    Raises:
        InputError: the train split has fewer sentences than a batch.
    """

    def __init__(self, encoded: EncodedTags, config: TaggingSettings, seed: int) -> None:
        def sentences(split: Split) -> TaggedSentences:
            return TaggedSentences(
                encoded.splits[split].tokens,
                encoded.tags[split],
                length=config.data.sequence_length,
            )

        super().__init__(config, sentences, seed)

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return the percentage of words whose part of speech is right."""
        del brief
        num_right = num_words = 0
        for batch in self.evaluation(split):
            answers = model(**batch.to(device).inputs()).argmax(-1).cpu()
            is_word = batch.targets != IGNORED
            num_right += int((answers == batch.targets)[is_word].sum())
            num_words += int(is_word.sum())
        return {"accuracy": 100 * num_right / num_words}
