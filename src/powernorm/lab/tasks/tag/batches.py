"""Tagged sentences as the batches of a run."""

from powernorm.lab.data.corpus import Split
from powernorm.lab.tasks.tag.settings import TaggingSettings
from powernorm.lab.tasks.tag.tagged_sentences import EvaluationTags, TrainingTags
from powernorm.lab.tasks.tag.tagged_words import EncodedTags
from powernorm.lab.training.batches import RunData


class TaggedSentenceData(RunData[TaggingSettings]):
    """Padded sentences, in which every word's part of speech is predicted from all words.

    Args:
        encoded: the treebank over its words and tags.
        config: lengths, sizes and number of steps.
        seed: of the order of the sentences.

    Raises:
        InputError: the train split has fewer sentences than a batch.
    """

    def __init__(self, encoded: EncodedTags, config: TaggingSettings, seed: int) -> None:
        sentences = TrainingTags(
            encoded.splits["train"].tokens,
            encoded.tags["train"],
            length=config.data.sequence_length,
            batch_size=config.data.batch_size,
            seed=seed,
        )
        super().__init__(config, sentences)
        self._encoded = encoded
        self._tags = encoded.tags

    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationTags:
        """Return the batches of a split, whole or about `max_tokens` of it."""
        return EvaluationTags(
            self._encoded.splits[split].tokens,
            self._tags[split],
            length=self._config.data.sequence_length,
            batch_size=self._config.data.evaluation_batch_size,
            max_tokens=max_tokens,
        )
