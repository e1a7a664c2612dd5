"""Masked sentences as the batches of a run."""

from powernorm.lab.data.corpus import Split
from powernorm.lab.data.subwords import EncodedCorpus
from powernorm.lab.tasks.mlm.masked_sentences import EvaluationSentences, TrainingSentences
from powernorm.lab.tasks.mlm.settings import MaskedLanguageModelSettings
from powernorm.lab.training.batches import RunData


class MaskedSentenceData(RunData[MaskedLanguageModelSettings]):
    """Padded sentences, in which masked tokens are predicted from all others.

    Args:
        encoded: the corpus over its subwords; the mask token is the id after the last of them.
        config: lengths, sizes and number of steps.
        seed: of the order of the sentences and of the masks.

    Raises:
        InputError: the train split has fewer sentences than a batch.
    """

    def __init__(
        self, encoded: EncodedCorpus, config: MaskedLanguageModelSettings, seed: int
    ) -> None:
        sentences = TrainingSentences(
            encoded.splits["train"].tokens,
            mask_id=encoded.vocabulary_size,
            length=config.data.sequence_length,
            batch_size=config.data.batch_size,
            seed=seed,
        )
        super().__init__(config, sentences)
        self._encoded = encoded

    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationSentences:
        """Return the batches of a split, whole or about `max_tokens` of it."""
        return EvaluationSentences(
            self._encoded.splits[split].tokens,
            mask_id=self._encoded.vocabulary_size,
            length=self._config.data.sequence_length,
            batch_size=self._config.data.evaluation_batch_size,
            max_tokens=max_tokens,
        )
