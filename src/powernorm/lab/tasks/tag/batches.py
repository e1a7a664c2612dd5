"""Tagged sentences as the batches of a run."""

from powernorm.lab.data.corpus import Split
from powernorm.lab.tasks.tag.settings import TaggingSettings
from powernorm.lab.tasks.tag.tagged_sentences import TaggedSentences
from powernorm.lab.tasks.tag.tagged_words import EncodedTags
from powernorm.lab.training.batches import RowData


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
