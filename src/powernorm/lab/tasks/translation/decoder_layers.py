"""A layer of the decoder: causal self-attention, attention to the source, feed-forward network."""

from collections.abc import Callable

from torch import Tensor, nn

from powernorm.lab.models.attention import MultiHeadAttention
from powernorm.lab.models.choices import TransformerShape
from powernorm.lab.models.layers import NormFactory, feedforward, residual
from powernorm.lab.tasks.translation.decoding_state import LayerState

Attend = Callable[[Tensor], Tensor]


class DecoderLayer(nn.Module):
    """Three sub-layers, each in its residual frame.

    Args:
        shape: of the layers.
        norm: makes each of the three norms.
    """

    def __init__(self, shape: TransformerShape, norm: NormFactory) -> None:
        super().__init__()

        def attention(*, causal: bool) -> MultiHeadAttention:
            return MultiHeadAttention(
                shape.num_features, shape.num_heads, dropout=shape.attention_dropout, causal=causal
            )

        self.attention = attention(causal=True)
        self.attention_frame = residual(shape, norm)
        self.memory_attention = attention(causal=False)
        self.memory_frame = residual(shape, norm)
        self.feedforward = feedforward(shape)
        self.feedforward_frame = residual(shape, norm)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output, (batch, length, features).

        Self-attention needs no padding mask: padding is at the end, and no token sees a later one.
        """

        def attend(inner: Tensor) -> Tensor:
            attended: Tensor = self.attention(inner)
            return attended

        def attend_to_memory(inner: Tensor) -> Tensor:
            attended: Tensor = self.memory_attention(inner, memory, memory_padding_mask)
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
        y: Tensor = self.feedforward_frame(x, self.feedforward, padding_mask)
        return y
