"""A tagger of named entities: a Transformer encoder with directional attention and a CRF."""

import torch
from torch import Tensor, nn

from powernorm.lab.models.choices import Activation, Initialization, Placement
from powernorm.lab.models.dropout import Dropout
from powernorm.lab.models.initialization import initialise
from powernorm.lab.models.layers import AttentionLayer, NormFactory
from powernorm.lab.models.norm_places import norms_by_layer
from powernorm.lab.tasks.ner.character_features import CharacterFeatures
from powernorm.lab.tasks.ner.directional_attention import DirectionalAttention
from powernorm.lab.tasks.ner.tag_sequences import TagSequences


class EntityTagger(nn.Module):
    """Says the tag of every word (TENER, Yan et al. 2019).

    Embeddings of the words and, where there are any, features of their characters; a linear map to
    the width of the encoder; its layers; scores of the tags, over which a conditional random field
    stands. With placement `pre` one more norm follows the last layer.

    Args:
        num_words: number of ids of words; 0 is padding.
        tags: the conditional random field, which knows the number of tags.
        norm: makes every norm of the model, or of its lowest layers.
        num_features: width of the encoder.
        num_layers: number of layers.
        num_heads: heads of each attention.
        feedforward_features: size inside the feed-forward networks.
        placement: where the norms stand.
        activation: of the feed-forward networks.
        dropout: in the layers, in training.
        attention_dropout: of the attention weights, in training.
        activation_dropout: after the activation, in training; None is `dropout`.
        embedding_features: size of a word's embedding; None is `num_features`.
        embedding_dropout: of the words' embeddings, in training; None is `dropout`.
        output_dropout: before the scores, in training.
        num_characters: number of ids of characters; 0 is padding.
        character_features: made of a word's characters; 0 leaves them out.
        character_dropout: of characters, in training; None is `embedding_dropout`.
        initialization: of the linear maps.
        seed: of the initial weights, which are the same for every norm.
        num_norm_layers: lowest layers whose norms are made by `norm`; None is all of them. The
            final norm belongs to the highest layer.
        upper_norm: makes the norms above these layers.

    Shape:
        - tokens: int64, (batch, length): ids of words
        - characters: int64, (batch, length, characters of the longest word)
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
        *,
        num_features: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        feedforward_features: int = 256,
        placement: Placement = "post",
        activation: Activation = "relu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float | None = None,
        embedding_features: int | None = None,
        embedding_dropout: float | None = None,
        output_dropout: float = 0.0,
        num_characters: int = 0,
        character_features: int = 0,
        character_dropout: float | None = None,
        initialization: Initialization = "xavier",
        seed: int = 0,
        num_norm_layers: int | None = None,
        upper_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        norms = norms_by_layer(norm, num_layers, num_norm_layers, upper_norm)
        embedding_features = embedding_features or num_features
        dropped = dropout if embedding_dropout is None else embedding_dropout
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
        self.projection = nn.Linear(embedding_features + character_features, num_features)
        self.layers = nn.ModuleList(
            AttentionLayer(
                DirectionalAttention(num_features, num_heads, dropout=attention_dropout),
                num_features,
                feedforward_features,
                layer_norm,
                placement=placement,
                activation=activation,
                dropout=dropout,
                activation_dropout=activation_dropout,
            )
            for layer_norm in norms
        )
        self.final_norm = norms[-1](num_features) if placement == "pre" else None
        self.output_dropout = Dropout(output_dropout)
        self.head = nn.Linear(num_features, tags.crf.num_tags)
        self.tags = tags
        generator = initialise(self, seed, initialization)
        for module in self.modules():
            if isinstance(module, DirectionalAttention | TagSequences):
                module.initialise(generator)

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the scores of the tags of every word, as `nll` and `decode` take them."""
        features = self.features(tokens, characters, padding_mask)
        scores: Tensor = self.head(self.output_dropout(features))
        return scores

    def features(
        self,
        tokens: Tensor,
        characters: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return what the scores are made from, (batch, length, num_features)."""
        x: Tensor = self.embedding_dropout(self.embedding(tokens))
        if self.characters is not None and characters is not None:
            x = torch.cat((x, self.characters(characters)), dim=-1)
        x = self.projection(x)
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
