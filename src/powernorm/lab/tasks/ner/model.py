"""A tagger of named entities: a Transformer encoder with directional attention and a CRF."""

import torch
from torch import Tensor, nn

from powernorm.lab.models.choices import TransformerShape
from powernorm.lab.models.dropout import Dropout
from powernorm.lab.models.initialization import initialize
from powernorm.lab.models.layers import (
    AttentionLayer,
    embedding_norm,
    final_norm,
    norms_by_layer,
)
from powernorm.lab.models.normed import NormFactory
from powernorm.lab.models.placements import layer_places
from powernorm.lab.tasks.ner.directional_attention import DirectionalAttention
from powernorm.lab.tasks.ner.tag_sequences import TagSequences

WINDOW = 3
"""Characters that a filter sees."""


class CharacterFeatures(nn.Module):
    """A convolution over the characters of a word, and the maximum over them (Ma and Hovy 2016).

    The convolution is a linear map of every `WINDOW` neighboring characters, followed by ReLU; the
    maximum is over a word's own characters, whatever stands after them.

    Args:
        num_characters: number of ids; 0 is padding.
        num_features: of a character, and of a word.
        dropout: of the characters' embeddings, in training.

    Shape:
        - characters: int64, (…, characters)
        - output: (…, num_features); 0 for a word without characters
    """

    def __init__(self, num_characters: int, num_features: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, num_features)
        self.dropout = Dropout(dropout)
        self.filters = nn.Linear(WINDOW * num_features, num_features)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the features of every word."""
        is_there = (characters != 0).unsqueeze(-1)
        x: Tensor = self.dropout(self.embedding(characters)) * is_there
        padded = nn.functional.pad(x, (0, 0, WINDOW // 2, WINDOW // 2))
        length = characters.shape[-1]
        windows = [padded.narrow(-2, shift, length) for shift in range(WINDOW)]
        found: Tensor = self.filters(torch.cat(windows, dim=-1)).relu()
        # No feature is below 0, so zeros in place of what is no character change no maximum.
        return (found * is_there).amax(dim=-2)


class EntityTagger(nn.Module):
    """Says the tag of every word (TENER, Yan et al. 2019).

    Embeddings of the words and, where there are any, of bigrams, and features of the words'
    characters; a linear map to the width of the encoder; its layers; scores of the tags, over which
    a conditional random field stands. With most placements one more norm follows the last layer.

    Args:
        num_words: number of ids of words; 0 is padding.
        tags: the conditional random field, which knows the number of tags.
        norm: makes every norm of the model, or of its lowest layers.
        shape: of its layers.
        embedding_features: size of a word's embedding; None is that of the layers.
        embedding_dropout: of the embeddings of words and bigrams, in training; None is that of the
            layers.
        output_dropout: before the scores, in training.
        num_characters: number of ids of characters; 0 is padding.
        character_features: made of a word's characters; 0 leaves them out.
        character_dropout: of characters, in training; None is `embedding_dropout`.
        num_bigrams: number of ids of bigrams; 0 is padding.
        bigram_features: size of a bigram's embedding; 0 leaves them out.
        seed: of the initial weights, which are the same for every norm.
        upper_norm: makes the norms above the lowest layers.

    Shape:
        - tokens: int64, (batch, length): ids of words
        - characters: int64, (batch, length, characters of the longest word)
        - bigrams: int64, (batch, length): ids of bigrams
        - padding_mask: bool, (batch, length), True = padding, at the end of a row
        - output: scores, (batch, length, tags)

    Raises:
        InputError: `num_heads` does not divide `num_features` into heads of an even size.
    """

    def __init__(
        self,
        num_words: int,
        tags: TagSequences,
        norm: NormFactory,
        shape: TransformerShape,
        *,
        embedding_features: int | None = None,
        embedding_dropout: float | None = None,
        output_dropout: float = 0.0,
        num_characters: int = 0,
        character_features: int = 0,
        character_dropout: float | None = None,
        num_bigrams: int = 0,
        bigram_features: int = 0,
        seed: int = 0,
        upper_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        norms = norms_by_layer(norm, shape, upper_norm)
        num_features = shape.num_features
        embedding_features = embedding_features or num_features
        dropped = shape.dropout if embedding_dropout is None else embedding_dropout
        self.embedding = nn.Embedding(num_words, embedding_features)
        self.embedding_dropout = Dropout(dropped)
        self.characters = (
            CharacterFeatures(
                num_characters,
                character_features,
                dropout=dropped if character_dropout is None else character_dropout,
            )
            if character_features
            else None
        )
        self.bigrams = nn.Embedding(num_bigrams, bigram_features) if bigram_features else None
        self.projection = nn.Linear(
            embedding_features + character_features + bigram_features, num_features
        )
        self.embedding_norm = embedding_norm(shape, norms[0])
        self.layers = nn.ModuleList(
            AttentionLayer(
                DirectionalAttention(
                    num_features,
                    shape.num_heads,
                    dropout=shape.attention_dropout,
                    scales_heads=places.scales_heads,
                ),
                shape,
                layer_norm,
                places=places,
            )
            for layer_norm, places in zip(norms, layer_places(shape), strict=True)
        )
        self.final_norm = final_norm(shape, norms[-1])
        self.output_dropout = Dropout(output_dropout)
        self.head = nn.Linear(num_features, tags.crf.num_tags)
        self.tags = tags
        initialize(self, seed, shape.initialization)

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor | None = None,
        padding_mask: Tensor | None = None,
        bigrams: Tensor | None = None,
    ) -> Tensor:
        """Return the scores of the tags of every word, as `nll` and `decode` take them."""
        features = self.features(tokens, characters, padding_mask, bigrams)
        scores: Tensor = self.head(self.output_dropout(features))
        return scores

    def features(
        self,
        tokens: Tensor,
        characters: Tensor | None = None,
        padding_mask: Tensor | None = None,
        bigrams: Tensor | None = None,
    ) -> Tensor:
        """Return what the scores are made from, (batch, length, num_features)."""
        embedded: Tensor = self.embedding(tokens)
        if self.bigrams is not None and bigrams is not None:
            embedded = torch.cat((embedded, self.bigrams(bigrams)), dim=-1)
        x: Tensor = self.embedding_dropout(embedded)
        if self.characters is not None and characters is not None:
            x = torch.cat((x, self.characters(characters)), dim=-1)
        x = self.projection(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, padding_mask)
        for layer in self.layers:
            x = layer(x, padding_mask)
        if self.final_norm is not None:
            x = self.final_norm(x, padding_mask)
        return x

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of the tags of all sentences, 0-d.

        Args:
            outputs: scores of `forward`.
            targets: int64, (batch, length): ids of tags; -100 at padding, at the end of a row.
        """
        return self.tags.nll(outputs, targets)

    def decode(self, outputs: Tensor, padding_mask: Tensor | None = None) -> list[list[int]]:
        """Return the most probable ids of tags of every sentence, padding left out."""
        return self.tags.decode(outputs, padding_mask)
