"""The translation task: sentence pairs, an encoder-decoder Transformer, and BLEU."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powernorm_lab.data.baselines import UnigramModel
from powernorm_lab.data.corpus import EVALUATED_SPLITS
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.engine.folders import write_json
from powernorm_lab.runs import SUBWORDS_FILE, TRANSLATION_METRICS, Baseline
from powernorm_lab.settings.model import SAME
from powernorm_lab.tasks.translation.batches import TranslationData
from powernorm_lab.tasks.translation.data import EncodedPairs, PairOptions, encode_pairs
from powernorm_lab.tasks.translation.model import NormPlaces, TranslationModel
from powernorm_lab.tasks.translation.scores import corpus_scores
from powernorm_lab.tasks.translation.search import translate_split
from powernorm_lab.tasks.translation.settings import TranslationSettings
from powernorm_lab.tasks.translation.sources import load_pairs
from powernorm_lab.tasks.translation.vocabulary import (
    SPLIT,
    SubwordVocabulary,
    Tokenization,
    joined,
    read_subwords,
)
from powernorm_lab.training.evaluation import Scores
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import UPPER_NORM, norm_factory, norm_options, qk_norm_factory
from powernorm_lab.training.task import BuiltinTask, Sizes


class TranslationTask(BuiltinTask[EncodedPairs, TranslationSettings]):
    """Translation of sentences."""

    name = "translation"
    metrics = TRANSLATION_METRICS
    data = TranslationData

    def encode(self, config: TranslationSettings, source: str | None = None) -> EncodedPairs:
        """Read and encode sentence pairs; `source` with the subwords of `data.path`."""
        data, is_split = config.data, config.data.subwords == SPLIT
        options = PairOptions(
            vocabulary_size=data.vocabulary_size,
            target_vocabulary_size=data.target_vocabulary_size,
            max_length=data.sequence_length,
            max_length_ratio=data.max_length_ratio,
            max_pairs=data.max_pairs,
        )
        corpus = load_pairs(data.path, data.languages, data.tokenized, is_split=is_split)
        imported = read_subwords(data.subwords, corpus, is_joint=data.joint_vocabulary)
        own = encode_pairs(corpus, options, imported=imported)
        if source is None:
            return own
        other = load_pairs(source, corpus.languages, data.tokenized, is_split=is_split)
        return encode_pairs(other, options, (own.source_subwords, own.target_subwords))

    def baselines(self, encoded: EncodedPairs, config: TranslationSettings) -> list[Baseline]:
        """Return the scores of a unigram of the target's subwords, and of the copied source."""
        train = encoded.splits["train"].target.tokens
        unigram = UnigramModel(train, encoded.target_vocabulary_size)
        losses: dict[str, float | None] = {}
        for split in EVALUATED_SPLITS:
            ids = encoded.splits[split].target.tokens.long()
            loss = -float(unigram.probabilities(ids).log().mean())
            losses[f"{split}_loss"] = loss
            losses[f"{split}_perplexity"] = float(torch.tensor(loss).exp())
        copied = corpus_scores(
            encoded.sources("test"),
            encoded.references("test"),
            encoded.corpus,
            splits_compounds=config.data.split_compounds,
        )
        return [
            Baseline(name="unigram", metrics=losses),
            Baseline(name="copy", metrics=copied.metrics),
        ]

    def facts(self, encoded: EncodedPairs) -> dict[str, Any]:
        """Return name, source, license and sizes of the sentence pairs."""
        return encoded.facts()

    def summary(self, encoded: EncodedPairs) -> DataPrepared:
        """Return the event that describes the data."""
        name = f"{encoded.corpus.name} {encoded.corpus.languages}"
        num_pairs = len(encoded.splits["train"])
        left_out = {reason: number for reason, number in encoded.dropped["train"].items() if number}
        return DataPrepared(name, num_pairs, "sentence pairs", encoded.vocabulary_size, left_out)

    def sizes(self, encoded: EncodedPairs) -> Sizes:
        """Return the numbers of subwords of source and target."""
        return (encoded.vocabulary_size, encoded.target_vocabulary_size)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the numbers of subwords from the weights of a model."""
        return (
            len(weights["source_embedding.weight"]),
            len(weights["target_embedding.weight"]),
        )

    def build(self, config: TranslationSettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms.

        Args:
            config: configuration with the model's shape.
            norm: short name of the encoder's norms, except for places with another norm.
            sizes: numbers of subwords of source and target.
            seed: seed of the initial weights.

        Raises:
            InputError: the norm is unknown, or its options do not fit it or the model.
        """
        shape = config.model
        final = shape.final_norm or norm
        options = {
            place: norm_options(config, place, shape.norm_widths)
            for place in norms_of(config, norm)
        }
        final_options = dict(options[final])
        if shape.final_norm_warmup is not None and "warmup_steps" in final_options:
            final_options["warmup_steps"] = shape.final_norm_warmup
        decoder = norm if shape.decoder_norm == SAME else shape.decoder_norm
        return TranslationModel(
            sizes[0],
            sizes[-1],
            NormPlaces(
                layers=norm_factory(norm, options[norm]), final=norm_factory(final, final_options)
            ),
            norm_factory(decoder, options[decoder]),
            shape.shape,
            num_decoder_layers=shape.num_decoder_layers,
            shared_embeddings=shape.shared_embeddings,
            seed=seed,
            upper_norm=norm_factory(UPPER_NORM),
            qk_norm=qk_norm_factory(config),
        )

    def example_inputs(self, config: TranslationSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return a random source and target of different lengths, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        length = min(config.data.sequence_length, 32)
        source = torch.randint(sizes[0], (2, length), generator=generator)
        target = torch.randint(sizes[1], (2, max(2, length - 3)), generator=generator)
        return (source, target)

    def keep(self, encoded: EncodedPairs, folder: Path) -> None:
        """Write the subwords into a run's folder."""
        is_split = encoded.corpus.is_split
        sources = (source for source, _ in encoded.corpus.pairs("train"))
        vocabulary = SubwordVocabulary(
            encoded.source_subwords,
            encoded.target_subwords,
            (encoded.corpus.source_language, encoded.corpus.target_language),
            Tokenization.of(map(joined, sources) if is_split else sources)
            if encoded.corpus.tokenized
            else None,
        )
        write_json(folder / SUBWORDS_FILE, vocabulary.to_json())

    def check(self, config: TranslationSettings, norm: str) -> None:
        """Check the settings and all norms of the model.

        Raises:
            InputError: a setting or norm does not fit.
        """
        super().check(config, norm)
        for name in norms_of(config, norm):
            norm_options(config, name, config.model.norm_widths)

    def score(
        self,
        model: TaskModel,
        encoded: EncodedPairs,
        config: TranslationSettings,
        device: torch.device,
    ) -> Scores:
        """Return BLEU and chrF of the test split's translations."""
        found = translate_split(model, encoded, "test", config.decoding, device)
        lines = (found.sources, found.references, found.translations)
        scores = corpus_scores(
            found.translations,
            found.references,
            encoded.corpus,
            splits_compounds=config.data.split_compounds,
        )
        return replace(
            scores,
            metrics={**scores.metrics, "decoding_tokens_per_second": found.tokens_per_second},
            translations=tuple(zip(*lines, strict=True)),
        )


def norms_of(config: TranslationSettings, norm: str) -> list[str]:
    """Return the short names of all norms in the model of a run, each once."""
    shape = config.model
    decoder = norm if shape.decoder_norm == SAME else shape.decoder_norm
    return list(dict.fromkeys([norm, shape.final_norm or norm, decoder]))
