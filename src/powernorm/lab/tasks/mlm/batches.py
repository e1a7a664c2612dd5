"""Masked sentences as the batches of a run (Devlin et al. 2019).

A row is a document, without its end mark; a longer one than `length` tokens makes several rows. In
every row about 15 % of the tokens, at least one, are replaced by a mask token and asked for. (The
tenths that BERT leaves or replaces by a random token are left out.)
"""

from typing import Final

import torch
from torch import Tensor

from powernorm.lab.data.batch import IGNORED, MASK, Batch
from powernorm.lab.data.corpus import Split
from powernorm.lab.data.orders import SEED_STRIDE
from powernorm.lab.data.rows import DocumentRows
from powernorm.lab.data.subwords import END_ID, EncodedCorpus
from powernorm.lab.tasks.mlm.settings import MaskedLanguageModelSettings
from powernorm.lab.training.batches import RowData

MASKED_FRACTION: Final = 0.15
_MASK_SEED: Final = 1 << 31
_EVALUATION_SEED: Final = 3 << 30
# Keep the generators of masks apart from those of the order; torch looks at 32 bits of a seed.


class MaskedSentences(DocumentRows):
    """Sentences under masks: in a training those of seed and position, in an evaluation the same.

    Args:
        tokens: the stream, every document followed by the end mark, (num_tokens,).
        mask_id: of the mask token.
        length: tokens in a row at most.
    """

    def __init__(self, tokens: Tensor, *, mask_id: int, length: int) -> None:
        super().__init__(tokens, length)
        self._tokens = tokens
        self._mask_id = mask_id

    def batch(self, rows: Tensor, mask_seed: int = _EVALUATION_SEED) -> Batch:
        """Return rows by number, padded to the longest, with masks that a seed determines."""
        places, padding = self.places(rows)
        whole = self._tokens[places].long().masked_fill(padding, END_ID)
        masked = _masked(padding, mask_seed)
        return Batch(
            named={"tokens": whole.masked_fill(masked, self._mask_id), MASK: padding},
            targets=whole.masked_fill(~masked, IGNORED),
            num_tokens=int((~padding).sum()),
            num_targets=int(masked.sum()),
        )

    def training_batch(self, rows: Tensor, seed: int, position: int) -> Batch:
        """Return rows under other masks in every epoch."""
        return self.batch(rows, _MASK_SEED + seed * SEED_STRIDE + position)

    def evaluation_batch(self, rows: Tensor, number: int) -> Batch:
        """Return rows under masks that are always the same."""
        return self.batch(rows, _EVALUATION_SEED + number)


def _masked(padding: Tensor, seed: int) -> Tensor:
    """Choose positions: each with probability `MASKED_FRACTION`, and at least one in a row."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(padding.shape, generator=generator).masked_fill(padding, torch.inf)
    return (draws < MASKED_FRACTION) | (draws == draws.amin(dim=1, keepdim=True))


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
