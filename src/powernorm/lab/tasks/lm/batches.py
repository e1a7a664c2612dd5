"""Segments of a stream of text as the batches of a run."""

from powernorm.lab.data.corpus import Split
from powernorm.lab.data.segments import TextSegments
from powernorm.lab.data.subwords import EncodedCorpus
from powernorm.lab.tasks.lm.settings import LanguageModelSettings
from powernorm.lab.training.batches import RowData


class LanguageModelData(RowData[LanguageModelSettings]):
    """Segments of a stream of text, in which each token is predicted from those before it.

    Args:
        encoded: the corpus over its subwords.
        config: lengths, sizes and number of steps.
        seed: of the order of the segments.

    Raises:
        InputError: the train split is shorter than one batch.
    """

    def __init__(self, encoded: EncodedCorpus, config: LanguageModelSettings, seed: int) -> None:
        self._encoded = encoded

        def segments(split: Split) -> TextSegments:
            return TextSegments(encoded.splits[split].tokens, length=config.data.sequence_length)

        super().__init__(config, segments, seed)

    def words_per_token(self, split: Split) -> float:
        """Return the ratio that turns nats per token into nats per word."""
        part = self._encoded.splits[split]
        return part.num_words / part.num_tokens
