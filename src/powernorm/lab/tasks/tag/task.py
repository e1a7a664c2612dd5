"""Part-of-speech tagging: predict the part of speech of every word."""

from powernorm.lab.data.treebanks import load_treebank
from powernorm.lab.tasks.tag.baselines import tag_metrics
from powernorm.lab.tasks.tag.batches import TaggedSentenceData
from powernorm.lab.tasks.tag.settings import TaggingSettings
from powernorm.lab.tasks.tag.tagged_words import (
    EncodedTags,
    encode_treebank,
    encode_treebank_by,
)
from powernorm.lab.tasks.text import TextTask
from powernorm.lab.training.batches import RunData
from powernorm.runs import Baseline


class TaggingTask(TextTask[EncodedTags, TaggingSettings]):
    """Predict the part of speech of every word.

    The ids of the tags are part of the treebank's vocabulary.
    """

    units = "words and tags"

    def encode(self, config: TaggingSettings) -> EncodedTags:
        """Read the treebank and number its words and tags."""
        return encode_treebank(load_treebank(config.data.path), config.data.vocabulary_size)

    def encode_by(self, source: str, config: TaggingSettings) -> EncodedTags:
        """Read `source` with the words and tags of `data.path`."""
        own = load_treebank(config.data.path)
        return encode_treebank_by(load_treebank(source), own, config.data.vocabulary_size)

    def data(
        self, encoded: EncodedTags, config: TaggingSettings, seed: int
    ) -> RunData[TaggingSettings]:
        """Return padded sentences with tags."""
        return TaggedSentenceData(encoded, config, seed)

    def baselines(self, encoded: EncodedTags, config: TaggingSettings) -> list[Baseline]:
        """Return the most frequent tag, and that of each word."""
        del config
        return [Baseline(name=name, metrics=found) for name, found in tag_metrics(encoded).items()]
