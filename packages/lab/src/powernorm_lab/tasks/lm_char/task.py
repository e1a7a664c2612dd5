"""The task of language modeling over bytes with a Transformer-XL."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.engine.events import DataPrepared
from powernorm_lab.runs import Baseline
from powernorm_lab.settings.comparison import options_of
from powernorm_lab.tasks.lm_char.baselines import byte_metrics
from powernorm_lab.tasks.lm_char.batches import CharacterData
from powernorm_lab.tasks.lm_char.model import TransformerXL
from powernorm_lab.tasks.lm_char.settings import CharacterSettings
from powernorm_lab.tasks.lm_char.texts import VOCABULARY_SIZE, EncodedBytes, load_bytes
from powernorm_lab.training.batches import RunData
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.norms import UPPER_NORM, norm_factory, norm_options
from powernorm_lab.training.task import BuiltinTask, Sizes


class CharacterTask(BuiltinTask[EncodedBytes, CharacterSettings]):
    """Language modeling over bytes."""

    name = "lm-char"
    units = "bytes"
    metrics = ("valid_bits_per_character", "test_bits_per_character")

    def encode(self, config: CharacterSettings) -> EncodedBytes:
        """Read the text of `data.path`."""
        return load_bytes(config.data.path)

    def encode_by(self, source: str, config: CharacterSettings) -> EncodedBytes:
        """Read `source`; the vocabulary of bytes is always the same."""
        del config
        return load_bytes(source)

    def data(
        self, encoded: EncodedBytes, config: CharacterSettings, seed: int
    ) -> RunData[CharacterSettings]:
        """Return the batches of byte streams."""
        return CharacterData(encoded, config, seed)

    def baselines(self, encoded: EncodedBytes, config: CharacterSettings) -> list[Baseline]:
        """Return the scores of unigram, bigram and trigram models."""
        del config
        return [
            Baseline(name=name, metrics=metrics) for name, metrics in byte_metrics(encoded).items()
        ]

    def facts(self, encoded: EncodedBytes) -> dict[str, Any]:
        """Return name, source, license and sizes of the text."""
        return {
            "name": encoded.name,
            "source": encoded.source,
            "licence": encoded.license,
            "vocabulary_size": VOCABULARY_SIZE,
            "splits": {split: {"bytes": encoded.splits[split].numel()} for split in SPLITS},
        }

    def summary(self, encoded: EncodedBytes) -> DataPrepared:
        """Return the event that describes the data."""
        return DataPrepared(encoded.name, encoded.splits["train"].numel(), "bytes", VOCABULARY_SIZE)

    def sizes(self, encoded: EncodedBytes) -> Sizes:
        """Return the number of distinct bytes."""
        del encoded
        return (VOCABULARY_SIZE,)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the number of ids from the weights of a model."""
        return (len(weights["embedding.weight"]),)

    def build(self, config: CharacterSettings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; models of equal seeds have equal weights for all norms."""
        return _build_transformer_xl(config, norm, sizes[-1], seed)

    def example_inputs(self, config: CharacterSettings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return random bytes, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        return (torch.randint(sizes[-1], shape, generator=generator),)

    def check(self, config: CharacterSettings, norm: str) -> None:
        """Check the settings and the norm's options.

        Raises:
            InputError: a setting or option does not fit.
        """
        super().check(config, norm)
        norm_options(config, norm, config.model.norm_widths)


def _build_transformer_xl(
    config: CharacterSettings, norm: str, vocabulary_size: int, seed: int
) -> TransformerXL:
    """Build the model of one run; models of equal seeds have equal weights for all norms.

    Without `model.memory_length` the memory is as long as a segment. Longer distances than in
    training, which occur with a longer memory in evaluation, are clamped to the longest one.

    Args:
        config: configuration with the model's shape.
        norm: short name.
        vocabulary_size: number of tokens.
        seed: seed of the initial weights.

    Raises:
        InputError: the norm is unknown, or its options do not fit it or the model.
    """
    shape, length = config.model, config.data.sequence_length
    memory_length = length if shape.memory_length is None else shape.memory_length
    return TransformerXL(
        vocabulary_size,
        norm_factory(norm, options_of(config, norm)),
        config.model.shape,
        memory_length=memory_length,
        evaluation_memory_length=shape.evaluation_memory_length,
        num_lanes=config.optimizer.accumulation,
        max_distance=memory_length + length - 1,
        seed=seed,
        upper_norm=norm_factory(UPPER_NORM),
    )
