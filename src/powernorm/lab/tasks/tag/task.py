"""Part-of-speech tagging: predict the part of speech of every word."""

import math
from typing import Literal

from torch import Tensor

from powernorm.lab.data.baselines import UnigramModel, WordTagModel
from powernorm.lab.data.corpus import Split
from powernorm.lab.data.subwords import END_ID
from powernorm.lab.data.treebanks import load_treebank
from powernorm.lab.tasks.tag.batches import TaggedSentenceData
from powernorm.lab.tasks.tag.settings import TaggingSettings
from powernorm.lab.tasks.tag.tagged_words import EncodedTags, encode_treebank, encode_treebank_by
from powernorm.lab.tasks.text import TextTask
from powernorm.lab.training.batches import RunData
from powernorm.runs import Baseline


class TaggingTask(TextTask[EncodedTags, TaggingSettings]):
    """Predict the part of speech of every word.

    The ids of the tags are part of the treebank's vocabulary.
    """

    name = "tag"
    units = "words and tags"
    metrics = ("valid_accuracy", "test_accuracy")

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


TagBaseline = Literal["unigram", "word"]


def tag_metrics(encoded: EncodedTags) -> dict[TagBaseline, dict[str, float | None]]:
    """Return loss (nats per tag) and perplexity (per tag) of the valid and test splits.

    Returns:
        Those of the tags' own frequencies, and of the frequencies for each word.
    """
    train, num_tags = _tagged(encoded, "train"), len(encoded.tag_names)
    unigram = UnigramModel(train[1], num_tags)
    word = WordTagModel(*train, encoded.num_word_ids, num_tags)
    metrics: dict[TagBaseline, dict[str, float | None]] = {"unigram": {}, "word": {}}
    for split in ("valid", "test"):
        words, tags = _tagged(encoded, split)
        probabilities = {"unigram": unigram.probabilities(tags)}
        probabilities["word"] = word.probabilities(words, tags)
        for name, found in metrics.items():
            loss = -float(probabilities[name].log().mean())
            found[f"{split}_perplexity"] = math.exp(loss)
            found[f"{split}_loss"] = loss
    return metrics


def _tagged(encoded: EncodedTags, split: Split) -> tuple[Tensor, Tensor]:
    """Return the words of a split and their tags counted from 0, without end marks."""
    words, tags = encoded.splits[split].tokens.long(), encoded.tags[split].long()
    is_word = words != END_ID
    return words[is_word], tags[is_word] - encoded.num_word_ids
