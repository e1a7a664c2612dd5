"""Masked sentences as the batches of a run."""

from powernorm.lab.data.corpus import Split
from powernorm.lab.data.subwords import EncodedCorpus
from powernorm.lab.tasks.mlm.masked_sentences import MaskedSentences
from powernorm.lab.tasks.mlm.settings import MaskedLanguageModelSettings
from powernorm.lab.training.batches import RowData


class MaskedSentenceData(RowData[MaskedLanguageModelSettings]):
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
        def sentences(split: Split) -> MaskedSentences:
            return MaskedSentences(
                encoded.splits[split].tokens,
                mask_id=encoded.vocabulary_size,
                length=config.data.sequence_length,
            )

        super().__init__(config, sentences, seed)
