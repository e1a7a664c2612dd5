"""Segments of a stream of text as the batches of a run."""

from powernorm.lab.data.corpus import Split
from powernorm.lab.data.segments import EvaluationSegments, TrainingSegments
from powernorm.lab.data.subwords import EncodedCorpus
from powernorm.lab.tasks.lm.settings import LanguageModelSettings
from powernorm.lab.training.batches import RunData


class LanguageModelData(RunData[LanguageModelSettings]):
    """Segments of a stream of text, in which each token is predicted from those before it.

    Args:
        encoded: the corpus over its subwords.
        config: lengths, sizes and number of steps.
        seed: of the order of the segments.

    Raises:
        InputError: the train split is shorter than one batch.
    """

    def __init__(self, encoded: EncodedCorpus, config: LanguageModelSettings, seed: int) -> None:
        segments = TrainingSegments(
            encoded.splits["train"].tokens,
            length=config.data.sequence_length,
            batch_size=config.data.batch_size,
            seed=seed,
            batches_per_update=config.optimizer.accumulation,
        )
        super().__init__(config, segments)
        self._encoded = encoded

    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationSegments:
        """Return the batches of a split, whole or about `max_tokens` of it."""
        return EvaluationSegments(
            self._encoded.splits[split].tokens,
            length=self._config.data.sequence_length,
            batch_size=self._config.data.evaluation_batch_size,
            max_tokens=max_tokens,
        )

    def words_per_token(self, split: Split) -> float:
        """Return the ratio that turns nats per token into nats per word."""
        part = self._encoded.splits[split]
        return part.num_words / part.num_tokens
