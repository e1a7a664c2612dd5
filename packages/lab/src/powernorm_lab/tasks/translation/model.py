"""An encoder-decoder Transformer for translation (Vaswani et al. 2017)."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.models.attention import attended_positions
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize, initialize_table
from powernorm_lab.models.layers import (
    FeedForward,
    TransformerLayer,
    attention,
    attention_frame,
    embedding_norm,
    feedforward_frame,
    final_norm,
    norms_by_layer,
    scale_branches,
)
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.models.placements import LayerPlaces, deepnorm_scales_of_both, layer_places
from powernorm_lab.models.positions import sinusoidal_positions
from powernorm_lab.tasks.translation.settings import SharedEmbeddings

# Cache of a decoder between two steps of a search: keys, values and an attention mask.
#
# The tokens of all hypotheses of a sentence are stored in one sequence and are never moved. When
# the search selects hypotheses, only a boolean mask changes: the tokens that each hypothesis
# consists of. No step copies keys and values, and for the decoder's modules the beam of a sentence
# has the place of a sequence's length in training.


_FIRST_STEPS = 16
"""Initial capacity in steps; the capacity doubles when it is full."""


class LayerState:
    """Keys and values of one decoder layer.

    Args:
        memory: keys and values of the source, (batch, heads, source length, features of a head).
    """

    def __init__(self, memory: tuple[Tensor, Tensor]) -> None:
        self.memory = memory
        self._kept: tuple[Tensor, Tensor] | None = None
        self._used = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, (batch, heads, beam, features of a head); return all."""
        begin, self._used = self._used, self._used + keys.shape[2]
        kept = self._kept
        if kept is None or kept[0].shape[2] < self._used:
            room = max(2 * begin, _FIRST_STEPS * keys.shape[2])
            kept = (_moved(kept, 0, keys, begin, room), _moved(kept, 1, values, begin, room))
            self._kept = kept
        kept[0][:, :, begin : self._used] = keys
        kept[1][:, :, begin : self._used] = values
        return kept[0][:, :, : self._used], kept[1][:, :, : self._used]

    def select(self, rows: Tensor) -> None:
        """Keep only these sentences."""
        self.memory = (self.memory[0].index_select(0, rows), self.memory[1].index_select(0, rows))
        if self._kept is not None:
            keys, values = self._kept
            self._kept = (keys.index_select(0, rows), values.index_select(0, rows))


def _moved(
    kept: tuple[Tensor, Tensor] | None, part: int, like: Tensor, used: int, room: int
) -> Tensor:
    """Return a buffer for `room` tokens with the used ones copied into it."""
    batch, heads, _, size = like.shape
    moved = like.new_empty(batch, heads, room, size)
    if kept is not None:
        moved[:, :, :used] = kept[part][:, :, :used]
    return moved


class DecodingState:
    """The state of a decoder for the hypotheses of a batch of sentences.

    Args:
        layers: keys and values of each layer.
        memory_allowed: mask of the attention to the source, True = attend, (batch, 1, 1, source
            length); None allows all positions.
        batch: number of sentences.
        beam_size: hypotheses of a sentence.
        device: device of the decoder.
    """

    def __init__(
        self,
        layers: list[LayerState],
        memory_allowed: Tensor | None,
        *,
        batch: int,
        beam_size: int,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.memory_allowed = memory_allowed
        self._itself = torch.eye(beam_size, dtype=torch.bool, device=device)
        self._visible = self._itself.new_empty(batch, beam_size, 0)

    def begin_step(self) -> Tensor:
        """Return the attention mask of the next step, (batch, 1, beam, stored tokens)."""
        own = self._itself.expand(self._visible.shape[0], -1, -1)
        self._visible = torch.cat((self._visible, own), dim=-1)
        return self._visible[:, None]

    def continue_from(self, origins: Tensor) -> None:
        """Make hypothesis j of a sentence a continuation of `origins[:, j]`, (batch, beam)."""
        index = origins[..., None].expand(-1, -1, self._visible.shape[-1])
        self._visible = self._visible.gather(1, index)

    def select(self, rows: Tensor) -> None:
        """Keep only these sentences."""
        self._visible = self._visible.index_select(0, rows)
        if self.memory_allowed is not None:
            self.memory_allowed = self.memory_allowed.index_select(0, rows)
        for layer in self.layers:
            layer.select(rows)


# Decoder layer: causal self-attention, attention to the source, feed-forward network.


Attend = Callable[[Tensor], Tensor]


class DecoderLayer(nn.Module):
    """A decoder layer with three sub-layers, each with a residual connection.

    Args:
        shape: shape of the layers.
        norm: builds the norms.
        places: places of the norms; None is those of the lowest layer.
        qk_norm: builds the norms of queries and keys, if the shape has them; None is `norm`.
    """

    def __init__(
        self,
        shape: TransformerShape,
        norm: NormFactory,
        *,
        places: LayerPlaces | None = None,
        qk_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        places = places or layer_places(shape)[0]
        self.branch_scale = places.branch_scale
        self.attention = attention(shape, places, norm, causal=True, qk_norm=qk_norm)
        self.attention_frame = attention_frame(shape, places, norm)
        self.memory_attention = attention(shape, places, norm, causal=False, qk_norm=qk_norm)
        self.memory_frame = attention_frame(shape, places, norm)
        self.feedforward = FeedForward(shape, places, norm)
        self.feedforward_frame = feedforward_frame(shape, places, norm)

    def scale_branches(self) -> None:
        """Multiply the initial weights of the branches by DeepNorm's β."""
        if self.branch_scale != 1:
            scale_branches(
                self.branch_scale, [self.attention, self.memory_attention, self.feedforward]
            )

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output, (batch, length, features).

        Self-attention needs the padding mask for its norms only: padding is at the end, and no
        token attends to a later one.
        """

        def attend(inner: Tensor) -> Tensor:
            attended: Tensor = self.attention(inner, query_mask=padding_mask)
            return attended

        def attend_to_memory(inner: Tensor) -> Tensor:
            attended: Tensor = self.memory_attention(
                inner, memory, memory_padding_mask, padding_mask
            )
            return attended

        return self._sublayers(x, attend, attend_to_memory, padding_mask)

    def step(
        self, x: Tensor, state: LayerState, visible: Tensor, memory_allowed: Tensor | None
    ) -> Tensor:
        """Return the output of the newest token of each hypothesis, (batch, beam, features).

        Args:
            x: (batch, beam, features).
            state: keys and values so far; those of the newest tokens are appended.
            visible: mask of the stored tokens of each hypothesis, (batch, 1, beam, stored).
            memory_allowed: mask of the attention to the source.
        """

        def attend(inner: Tensor) -> Tensor:
            keys, values = state.append(*self.attention.keys_values(inner))
            return self.attention.attend(inner, keys, values, visible)

        def attend_to_memory(inner: Tensor) -> Tensor:
            keys, values = state.memory
            return self.memory_attention.attend(inner, keys, values, memory_allowed)

        return self._sublayers(x, attend, attend_to_memory, None)

    def _sublayers(
        self, x: Tensor, attend: Attend, attend_to_memory: Attend, padding_mask: Tensor | None
    ) -> Tensor:
        x = self.attention_frame(x, attend, padding_mask)
        x = self.memory_frame(x, attend_to_memory, padding_mask)
        y: Tensor = self.feedforward_frame(
            x, lambda inner: self.feedforward(inner, padding_mask), padding_mask
        )
        return y


class NormPlaces(NamedTuple):
    """Norm factories of an encoder, by place."""

    layers: NormFactory
    """Factory for the norms of every layer."""
    final: NormFactory
    """Factory for the norm after the last layer, if the placement has one."""

    @classmethod
    def everywhere(cls, norm: NormFactory) -> "NormPlaces":
        """Return the same factory for every place."""
        return cls(norm, norm)


class LayerStack(nn.Module):
    """The layers of an encoder or a decoder, with the norms before and after them.

    Args:
        layers: layers, the lowest first.
        norm: norm after them, if the placement has one.
        embedding_norm: norm before them, if the placement has one.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        norm: nn.Module | None,
        embedding_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embedding_norm = embedding_norm
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class TranslationModel(nn.Module):
    """Predicts each token of a translation from the source and the tokens before it.

    Both sides embed tokens (scaled by √features) and add sinusoidal positions; then follow the
    layers of the encoder, those of the decoder, and logits. With most placements another norm
    follows the last layer of each side. In evaluation no output depends on a later target token,
    for any norm.

    Args:
        source_vocabulary_size: number of tokens of the source.
        target_vocabulary_size: number of tokens of the translation.
        encoder_norms: factories for the norms of the encoder, or of its lowest layers.
        decoder_norm: builds every norm of the decoder.
        shape: shape of the layers on both sides.
        num_decoder_layers: layers of the decoder; None is the number of the encoder's.
        shared_embeddings: tables of source, target and output that are shared.
        seed: seed of the initial weights, which are the same for every norm.
        upper_norm: builds the encoder's norms above its lowest layers.
        qk_norm: builds the norms of queries and keys, if the shape has them; None is the norm of
            the layer's attention.

    Shape:
        - source: int64, (batch, source length)
        - target: int64, (batch, target length), the decoder's input: start mark and tokens
        - source_padding_mask, target_padding_mask: bool, of the shape of source and target, True =
          padding; that of the target is at the end. A sentence may consist of padding only.
        - output: logits, (batch, target length, target_vocabulary_size)

    Raises:
        InputError: `num_heads` does not divide `num_features`, vocabularies of different sizes
            cannot share a table, or an input has a wrong shape or dtype.
    """

    def __init__(
        self,
        source_vocabulary_size: int,
        target_vocabulary_size: int,
        encoder_norms: NormPlaces,
        decoder_norm: NormFactory,
        shape: TransformerShape,
        *,
        num_decoder_layers: int | None = None,
        shared_embeddings: SharedEmbeddings = "all",
        seed: int = 0,
        upper_norm: NormFactory | None = None,
        qk_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        _check_vocabularies(source_vocabulary_size, target_vocabulary_size, shared_embeddings)
        upper = None if upper_norm is None else NormPlaces.everywhere(upper_norm)
        norms = norms_by_layer(encoder_norms, shape, upper)
        depth = shape.num_layers if num_decoder_layers is None else num_decoder_layers
        encoder_scales, decoder_scales = deepnorm_scales_of_both(shape.num_layers, depth)
        num_features = shape.num_features
        self.num_features = num_features
        self.embedding_scale = math.sqrt(num_features)
        self.source_embedding = nn.Embedding(source_vocabulary_size, num_features)
        self.target_embedding = nn.Embedding(target_vocabulary_size, num_features)
        self.dropout = Dropout(shape.dropout)
        encoder_layers = [
            TransformerLayer(shape, one.layers, places=places, qk_norm=qk_norm)
            for one, places in zip(norms, layer_places(shape, scales=encoder_scales), strict=True)
        ]
        self.encoder = LayerStack(
            encoder_layers,
            final_norm(shape, norms[-1].final),
            embedding_norm(shape, norms[0].layers),
        )
        decoder_layers = [
            DecoderLayer(shape, decoder_norm, places=places, qk_norm=qk_norm)
            for places in layer_places(shape, num_layers=depth, scales=decoder_scales)
        ]
        self.decoder = LayerStack(
            decoder_layers, final_norm(shape, decoder_norm), embedding_norm(shape, decoder_norm)
        )
        generator = initialize(self, seed, shape.initialization)
        self.head = nn.Linear(num_features, target_vocabulary_size, bias=False)
        self._share(shared_embeddings, generator)

    def _share(self, shared: SharedEmbeddings, generator: torch.Generator) -> None:
        """Tie the shared tables, and draw the output's table if it is separate."""
        if shared == "all":
            self.target_embedding.weight = self.source_embedding.weight
        if shared == "none":
            initialize_table(self.head.weight, generator)
        else:
            self.head.weight = self.target_embedding.weight

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the token after each position of the target."""
        logits: Tensor = self.head(
            self.features(source, target, source_padding_mask, target_padding_mask)
        )
        return logits

    def features(
        self,
        source: Tensor,
        target: Tensor,
        source_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the features before the output layer, (batch, target length, features)."""
        _check_tokens("target", target, target_padding_mask)
        if len(source) != len(target):
            raise InputError(
                f"source has {len(source)} rows and target {len(target)}: give a target for each "
                "source"
            )
        memory = self.encode(source, source_padding_mask)
        positions = self.positions(target.shape[1], target.device)
        x = self._embedded(
            self.target_embedding, target, positions, self.decoder, target_padding_mask
        )
        for layer in self.decoder.layers:
            x = layer(x, memory, target_padding_mask, source_padding_mask)
        if self.decoder.norm is not None:
            x = self.decoder.norm(x, target_padding_mask)
        return x

    def encode(self, source: Tensor, source_padding_mask: Tensor | None = None) -> Tensor:
        """Return the encoder's output, (batch, source length, features)."""
        _check_tokens("source", source, source_padding_mask)
        positions = self.positions(source.shape[1], source.device)
        x = self._embedded(
            self.source_embedding, source, positions, self.encoder, source_padding_mask
        )
        for layer in self.encoder.layers:
            x = layer(x, source_padding_mask)
        if self.encoder.norm is not None:
            x = self.encoder.norm(x, source_padding_mask)
        return x

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the encodings of the first positions, (length, features)."""
        return sinusoidal_positions(length, self.num_features, device=device)

    def begin(self, memory: Tensor, padding_mask: Tensor | None, beam_size: int) -> DecodingState:
        """Return the state before the first `step`.

        Args:
            memory: the encoder's output, (batch, source length, features).
            padding_mask: padding mask of the source.
            beam_size: hypotheses of each sentence.
        """
        layers = [
            LayerState(layer.memory_attention.keys_values(memory)) for layer in self._decoder()
        ]
        allowed = None if padding_mask is None else attended_positions(padding_mask)
        return DecodingState(
            layers, allowed, batch=len(memory), beam_size=beam_size, device=memory.device
        )

    def step(self, tokens: Tensor, position: Tensor, state: DecodingState) -> Tensor:
        """Return the logits after one more token of each hypothesis.

        Args:
            tokens: newest tokens, (batch, beam).
            position: encoding of their position, (features,), a row of `positions`.
            state: state of the tokens before them, which is updated.

        Returns:
            (batch, beam, target_vocabulary_size)
        """
        visible = state.begin_step()
        x = self._embedded(self.target_embedding, tokens, position, self.decoder, None)
        for layer, layer_state in zip(self._decoder(), state.layers, strict=True):
            x = layer.step(x, layer_state, visible, state.memory_allowed)
        if self.decoder.norm is not None:
            x = self.decoder.norm(x, None)
        logits: Tensor = self.head(x)
        return logits

    def _decoder(self) -> Iterator[DecoderLayer]:
        return (cast(DecoderLayer, layer) for layer in self.decoder.layers)

    def _embedded(
        self,
        embedding: nn.Module,
        tokens: Tensor,
        positions: Tensor,
        stack: LayerStack,
        padding_mask: Tensor | None,
    ) -> Tensor:
        embedded: Tensor = embedding(tokens) * self.embedding_scale
        embedded = embedded + positions.to(embedded.dtype)
        if stack.embedding_norm is not None:
            embedded = stack.embedding_norm(embedded, padding_mask)
        x: Tensor = self.dropout(embedded)
        return x


def _check_vocabularies(source: int, target: int, shared: SharedEmbeddings) -> None:
    if shared == "all" and source != target:
        raise InputError(
            f"shared_embeddings='all' needs one vocabulary, got {source} tokens of the source and "
            f"{target} of the target: give a joint vocabulary, or share 'target' or 'none'"
        )


def _check_tokens(name: str, tokens: Tensor, padding_mask: Tensor | None) -> None:
    if tokens.ndim != 2 or tokens.is_floating_point():
        raise InputError(
            f"{name} has shape {tuple(tokens.shape)} and dtype {tokens.dtype}, expected token "
            "numbers of shape (batch, length)"
        )
    if padding_mask is None:
        return
    if padding_mask.shape != tokens.shape or padding_mask.dtype != torch.bool:
        raise InputError(
            f"{name}_padding_mask has shape {tuple(padding_mask.shape)} and dtype "
            f"{padding_mask.dtype}, expected torch.bool of shape {tuple(tokens.shape)} with True = "
            "padding"
        )
