"""A layer of the decoder: causal self-attention, attention to the source, feed-forward network."""

from collections.abc import Callable

from torch import Tensor, nn

from powernorm.lab.models.choices import TransformerShape
from powernorm.lab.models.layers import (
    FeedForward,
    attention,
    attention_frame,
    feedforward_frame,
    scale_branches,
)
from powernorm.lab.models.normed import NormFactory
from powernorm.lab.models.placements import LayerPlaces, layer_places
from powernorm.lab.tasks.translation.decoding_state import LayerState

Attend = Callable[[Tensor], Tensor]


class DecoderLayer(nn.Module):
    """Three sub-layers, each in its residual frame.

    Args:
        shape: of the layers.
        norm: makes the norms.
        places: of the norms; None is where the lowest layer has them.
        qk_norm: makes the norms of queries and keys, where the shape has them; None is `norm`.
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

        Self-attention needs no padding mask, but for norms inside: padding is at the end, and no
        token sees a later one.
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
            state: keys and values so far, which the newest join.
            visible: which of the kept tokens each hypothesis consists of, (batch, 1, beam, kept).
            memory_allowed: where the attention to the source may look.
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
