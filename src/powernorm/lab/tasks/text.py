"""What language modeling, masked language modeling and tagging share: a text, one model."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from powernorm.lab.data.corpus import SPLITS, Split
from powernorm.lab.data.readers import load_corpus
from powernorm.lab.data.subwords import (
    EncodedCorpus,
    Subwords,
    Words,
    encode_by,
    encode_corpus,
)
from powernorm.lab.engine.events import DataPrepared
from powernorm.lab.models.language_model import LanguageModel
from powernorm.lab.settings.comparison import options_of
from powernorm.lab.training.losses import TaskModel
from powernorm.lab.training.norms import UPPER_NORM, norm_factory, qk_norm_factory
from powernorm.lab.training.task import BuiltinTask, Sizes

if TYPE_CHECKING:
    from powernorm.lab.tasks.lm.settings import LanguageModelSettings
    from powernorm.lab.tasks.mlm.settings import MaskedLanguageModelSettings
    from powernorm.lab.tasks.tag.settings import TaggingSettings

_Text = TypeVar("_Text", bound=EncodedCorpus)
_Settings = TypeVar(
    "_Settings", bound="LanguageModelSettings | MaskedLanguageModelSettings | TaggingSettings"
)
_Subword = TypeVar("_Subword", bound="LanguageModelSettings | MaskedLanguageModelSettings")


class TextTask(BuiltinTask[_Text, _Settings]):
    """A task whose model reads one text and says something at every position."""

    num_extra_tokens: ClassVar[int] = 0
    """Ids after those of the vocabulary, such as the mask token."""
    is_causal: ClassVar[bool] = False
    """Whether a position sees earlier ones only."""

    def facts(self, encoded: _Text) -> dict[str, Any]:
        """Return name, source, license and sizes of the text."""
        corpus = encoded.corpus
        return {
            "name": corpus.name,
            "source": corpus.source,
            "licence": corpus.license,
            "vocabulary_size": encoded.vocabulary_size,
            "splits": {
                split: {
                    "documents": len(corpus.documents[split]),
                    "words": encoded.splits[split].num_words,
                    "tokens": encoded.splits[split].num_tokens,
                    **_unknown(encoded, split),
                }
                for split in SPLITS
            },
        }

    def summary(self, encoded: _Text) -> DataPrepared:
        """Return the same in short."""
        num_words = encoded.splits["train"].num_words
        return DataPrepared(encoded.corpus.name, num_words, "words", encoded.vocabulary_size)

    def sizes(self, encoded: _Text) -> Sizes:
        """Return the number of ids."""
        return (encoded.vocabulary_size + self.num_extra_tokens,)

    def sizes_of_weights(self, weights: Mapping[str, Tensor]) -> Sizes:
        """Return the number of ids of a model."""
        # Of an adaptive softmax's model it is one level down.
        name = "embedding.weight"
        return (len(weights[name] if name in weights else weights[f"model.{name}"]),)

    def build(self, config: _Settings, norm: str, sizes: Sizes, seed: int) -> TaskModel:
        """Return the model of a run; equal seeds give equal weights to all norms.

        Raises:
            InputError: unknown norm, or options that do not fit it or the model.
        """
        return LanguageModel(
            sizes[-1],
            norm_factory(norm, options_of(config, norm)),
            config.model.shape,
            max_length=config.data.sequence_length,
            seed=seed,
            upper_norm=norm_factory(UPPER_NORM),
            causal=self.is_causal,
            attention=self.attention(config),
            qk_norm=qk_norm_factory(config),
        )

    def attention(self, config: _Settings) -> Callable[[], nn.Module] | None:
        """Return what makes the attentions of the layers, None for the usual ones."""
        del config
        return None

    def example_inputs(self, config: _Settings, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return tokens of the model's length, (2, length)."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, config.data.sequence_length)
        return (torch.randint(sizes[-1], shape, generator=generator),)


class SubwordTask(TextTask[EncodedCorpus, _Subword]):
    """A task over the subwords of a text."""

    def encode(self, config: _Subword) -> EncodedCorpus:
        """Read the text and number its subwords or words."""
        data = config.data
        kind = self._encoder_of(config)
        return encode_corpus(load_corpus(data.path), data.vocabulary_size, kind)

    def encode_by(self, source: str, config: _Subword) -> EncodedCorpus:
        """Read `source` with the subwords or words of `data.path`."""
        data = config.data
        other, kind = load_corpus(data.path), self._encoder_of(config)
        return encode_by(load_corpus(source), other, data.vocabulary_size, kind)

    def _encoder_of(self, config: _Subword) -> type[Subwords] | type[Words]:
        return Words if config.data.vocabulary == "words" else Subwords


def _unknown(encoded: EncodedCorpus, split: Split) -> dict[str, int]:
    """Return how many words of a split are not in the vocabulary, where this can be."""
    if encoded.unknown_id is None:
        return {}
    return {"unknown": int((encoded.splits[split].tokens == encoded.unknown_id).sum())}
