"""Masked language modeling: predict masked tokens from all others."""

import math

import torch

from powernorm.lab.data.baselines import UnigramModel
from powernorm.lab.data.batch import IGNORED
from powernorm.lab.data.subwords import EncodedCorpus
from powernorm.lab.tasks.mlm.batches import MaskedSentenceData
from powernorm.lab.tasks.mlm.settings import MaskedLanguageModelSettings
from powernorm.lab.tasks.text import SubwordTask
from powernorm.lab.training.batches import RunData
from powernorm.runs import Baseline


class MaskedLanguageModelTask(SubwordTask[MaskedLanguageModelSettings]):
    """Predict masked tokens from all others."""

    name = "mlm"
    num_extra_tokens = 1

    def data(
        self, encoded: EncodedCorpus, config: MaskedLanguageModelSettings, seed: int
    ) -> RunData[MaskedLanguageModelSettings]:
        """Return padded sentences with masks."""
        return MaskedSentenceData(encoded, config, seed)

    def baselines(
        self, encoded: EncodedCorpus, config: MaskedLanguageModelSettings
    ) -> list[Baseline]:
        """Return the unigram at the masked positions; a bigram would see masked neighbors."""
        unigram = UnigramModel(encoded.splits["train"].tokens, encoded.vocabulary_size)
        data = MaskedSentenceData(encoded, config, seed=0)
        metrics: dict[str, float | None] = {}
        for split in ("valid", "test"):
            targets = torch.cat([batch.targets.flatten() for batch in data.evaluation(split)])
            loss = -float(unigram.probabilities(targets[targets != IGNORED]).log().mean())
            metrics[f"{split}_perplexity"] = math.exp(loss)
            metrics[f"{split}_loss"] = loss
        return [Baseline(name="unigram", metrics=metrics)]
