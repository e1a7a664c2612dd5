"""The task of translation: sentence pairs, an encoder-decoder, BLEU of its translations."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from powernorm.data.baselines import UnigramModel
from powernorm.data.corpus import Split
from powernorm.data.pair_batches import EvaluationPairs, TrainingPairs
from powernorm.data.sentence_pairs import EncodedPairs, PairOptions, encode_pairs, load_pairs
from powernorm.errors import InputError
from powernorm.lab.engine.folders import write_json
from powernorm.models.translation import NormPlaces, TranslationModel
from powernorm.runs import TRANSLATION_METRICS, Baseline
from powernorm.training.batches import EvaluationBatches, RunData
from powernorm.training.bleu import corpus_scores
from powernorm.training.config import ComparisonConfig, DataConfig
from powernorm.training.language_modeling import UPPER_NORM, norm_factory, norm_options
from powernorm.training.source_text import Tokenisation
from powernorm.training.task import DataSummary, Scores, Sizes, Task, TaskModel
from powernorm.training.translating import translate_ids
from powernorm.training.vocabulary_files import VOCABULARY_FILE, vocabulary_record

SAME: Final = "same"
"""A decoder with the norms of the encoder."""
BASELINE_SPLITS: Final[tuple[Split, ...]] = ("valid", "test")


class TranslationData(RunData):
    """Sentence pairs, in which each subword of the translation is predicted from those before it.

    Args:
        encoded: the pairs over their subwords.
        config: budget of tokens, number of steps.
        seed: of the order.

    Raises:
        InputError: a pair is longer than a batch.
    """

    def __init__(self, encoded: EncodedPairs, config: ComparisonConfig, seed: int) -> None:
        pairs = TrainingPairs(
            encoded.splits["train"],
            batch_tokens=_batch_tokens(config),
            count_padding=config.data.count_padding,
            seed=seed,
            batches_per_update=config.optimizer.accumulation,
        )
        super().__init__(config, pairs)
        self._encoded = encoded

    def evaluation(self, split: Split, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of a split, whole or about `max_tokens` of it."""
        return EvaluationPairs(
            self._encoded.splits[split],
            batch_tokens=_batch_tokens(self._config),
            max_tokens=max_tokens,
        )


class TranslationTask(Task[EncodedPairs]):
    """Translate sentences."""

    metrics = TRANSLATION_METRICS
    required = ("data.batch_tokens",)
    uses = frozenset(
        {
            "model.num_norm_layers",
            "data.languages",
            "data.tokenised",
            "data.target_vocabulary_size",
            "data.batch_tokens",
            "data.count_padding",
            "data.max_length_ratio",
            "data.max_pairs",
            "model.num_decoder_layers",
            "model.decoder_norm",
            "model.attention_norm",
            "model.feedforward_norm",
            "model.final_norm",
            "model.final_norm_warmup",
            "model.attention_dropout",
            "model.activation_dropout",
            "model.shared_embeddings",
            "model.initialisation",
            "decoding.beam_size",
            "decoding.length_normalisation",
            "decoding.length_penalty",
            "decoding.max_length_factor",
            "decoding.max_length_offset",
            "decoding.batch_tokens",
        }
    )
    unused = ("data.batch_size", "data.evaluation_batch_size")

    def encode(self, data: DataConfig) -> EncodedPairs:
        """Read the sentence pairs and number their subwords."""
        corpus = load_pairs(data.path, data.languages, data.tokenised)
        return encode_pairs(corpus, _pair_options(data))

    def encode_by(self, source: str, data: DataConfig) -> EncodedPairs:
        """Read `source` with the subwords of `data.path`."""
        own = self.encode(data)
        corpus = load_pairs(source, own.corpus.languages, data.tokenised)
        subwords = (own.source_subwords, own.target_subwords)
        return encode_pairs(corpus, _pair_options(data), subwords)

    def data(self, encoded: EncodedPairs, config: ComparisonConfig, seed: int) -> RunData:
        """Return batches of sentence pairs."""
        return TranslationData(encoded, config, seed)

    def baselines(self, encoded: EncodedPairs, config: ComparisonConfig) -> list[Baseline]:
        """Return the unigram of the target's subwords, and the source left as it is."""
        del config
        train = encoded.splits["train"].target.tokens
        unigram = UnigramModel(train, encoded.target_vocabulary_size)
        losses: dict[str, float | None] = {}
        for split in BASELINE_SPLITS:
            ids = encoded.splits[split].target.tokens.long()
            loss = -float(unigram.probabilities(ids).log().mean())
            losses[f"{split}_loss"] = loss
            losses[f"{split}_perplexity"] = float(torch.tensor(loss).exp())
        copied = corpus_scores(encoded.sources("test"), encoded.references("test"), encoded.corpus)
        return [
            Baseline(name="unigram", metrics=losses),
            Baseline(name="copy", metrics=copied.metrics),
        ]

    def facts(self, encoded: EncodedPairs) -> dict[str, Any]:
        """Return name, source, licence and sizes of the sentence pairs."""
        return encoded.facts()

    def summary(self, encoded: EncodedPairs) -> DataSummary:
        """Return the same in short."""
        name = f"{encoded.corpus.name} {encoded.corpus.languages}"
        num_pairs = len(encoded.splits["train"])
        left_out = {reason: number for reason, number in encoded.dropped["train"].items() if number}
        return DataSummary(name, num_pairs, "sentence pairs", encoded.vocabulary_size, left_out)

    def sizes(self, encoded: EncodedPairs) -> Sizes:
        """Return the numbers of subwords of source and target."""
        return (encoded.vocabulary_size, encoded.target_vocabulary_size)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the numbers of subwords of a model."""
        return (
            len(weights["source_embedding.weight"]),
            len(weights["target_embedding.weight"]),
        )

    def build(self, config: ComparisonConfig, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; equal seeds give equal weights to all norms."""
        return build_translation_model(config, norm, sizes, seed)

    def example_inputs(self, config: ComparisonConfig, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return a source and a target of unlike lengths, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        length = min(config.data.sequence_length, 32)
        source = torch.randint(sizes[0], (2, length), generator=generator)
        target = torch.randint(sizes[1], (2, max(2, length - 3)), generator=generator)
        return (source, target)

    def keep(self, encoded: EncodedPairs, folder: Path) -> None:
        """Write the subwords into a run's folder."""
        record = vocabulary_record(
            encoded.source_subwords,
            encoded.target_subwords,
            (encoded.corpus.source_language, encoded.corpus.target_language),
            Tokenisation.of(source for source, _ in encoded.corpus.pairs("train"))
            if encoded.corpus.tokenised
            else None,
        )
        write_json(folder / VOCABULARY_FILE, record)

    def check(self, config: ComparisonConfig, norm: str) -> None:
        """Check the settings, and the norms of all places.

        Raises:
            InputError: one of them does not fit.
        """
        super().check(config, norm)
        _check_places(config)
        for name in norms_of(config, norm):
            norm_options(config, name)

    def score(
        self,
        model: TaskModel,
        encoded: EncodedPairs,
        config: ComparisonConfig,
        device: torch.device,
    ) -> Scores:
        """Return BLEU and chrF of the translations of the test split."""
        assert isinstance(model, TranslationModel)
        split = encoded.splits["test"]
        sources = [split.source.row(index)[:-1].tolist() for index in range(len(split))]
        found = translate_ids(model, sources, config.decoding, device)
        translations = encoded.target_subwords.decode([best[0].tokens for best in found.hypotheses])
        references = encoded.references("test")
        scores = corpus_scores(translations, references, encoded.corpus)
        return replace(
            scores,
            metrics={**scores.metrics, "decoding_tokens_per_second": found.tokens_per_second},
            translations=tuple(zip(encoded.sources("test"), references, translations, strict=True)),
        )


def build_translation_model(
    config: ComparisonConfig, norm: str, sizes: Sizes, seed: int
) -> TranslationModel:
    """Build the model of one run; equal seeds give equal weights to all norms.

    Args:
        config: has the model's shape.
        norm: short name of the encoder's norms, but for the places that have another.
        sizes: numbers of subwords of source and target.
        seed: of the initial weights.

    Raises:
        InputError: unknown norm, or options that do not fit it or the model.
    """
    shape = config.model
    final = shape.final_norm or norm
    options = {place: norm_options(config, place) for place in norms_of(config, norm)}
    final_options = dict(options[final])
    if shape.final_norm_warmup is not None and "warmup_steps" in final_options:
        final_options["warmup_steps"] = shape.final_norm_warmup
    attention, feedforward = shape.attention_norm or norm, shape.feedforward_norm or norm
    decoder = norm if shape.decoder_norm == SAME else shape.decoder_norm
    return TranslationModel(
        sizes[0],
        sizes[-1],
        NormPlaces(
            attention=norm_factory(attention, options[attention]),
            feedforward=norm_factory(feedforward, options[feedforward]),
            final=norm_factory(final, final_options),
        ),
        norm_factory(decoder, options[decoder]),
        num_features=shape.num_features,
        num_layers=shape.num_layers,
        num_decoder_layers=shape.num_decoder_layers or shape.num_layers,
        num_heads=shape.num_heads,
        feedforward_features=shape.feedforward_features,
        placement=shape.placement,
        activation=shape.activation,
        dropout=shape.dropout,
        attention_dropout=shape.attention_dropout,
        activation_dropout=(
            shape.dropout if shape.activation_dropout is None else shape.activation_dropout
        ),
        shared_embeddings=shape.shared_embeddings,
        initialisation=shape.initialisation,
        seed=seed,
        num_norm_layers=shape.num_norm_layers,
        upper_norm=norm_factory(UPPER_NORM),
    )


def norms_of(config: ComparisonConfig, norm: str) -> list[str]:
    """Return the short names of all norms in the model of a run, each once."""
    shape = config.model
    places = (shape.attention_norm, shape.feedforward_norm, shape.final_norm)
    decoder = norm if shape.decoder_norm == SAME else shape.decoder_norm
    return list(dict.fromkeys([*(place or norm for place in places), decoder]))


def _check_places(config: ComparisonConfig) -> None:
    shape, data = config.model, config.data
    if shape.placement == "post":
        for key in ("final_norm", "final_norm_warmup"):
            if getattr(shape, key) is not None:
                raise InputError(
                    f"model.{key}={getattr(shape, key)} has no place with model.placement=post, "
                    f"where no norm follows the last layer: set model.{key}=none."
                )
    if shape.shared_embeddings == "all" and data.target_vocabulary_size is not None:
        raise InputError(
            f"data.target_vocabulary_size={data.target_vocabulary_size} gives the target subwords "
            "of its own, which cannot share a table with those of the source: set "
            "model.shared_embeddings to target or none."
        )


def _pair_options(data: DataConfig) -> PairOptions:
    return PairOptions(
        vocabulary_size=data.vocabulary_size,
        target_vocabulary_size=data.target_vocabulary_size,
        max_length=data.sequence_length,
        max_length_ratio=data.max_length_ratio,
        max_pairs=data.max_pairs,
    )


def _batch_tokens(config: ComparisonConfig) -> int:
    if config.data.batch_tokens is None:
        raise InputError("The task translation needs data.batch_tokens: set it.")
    return config.data.batch_tokens
