"""Networks that classify series: a Conformer, or a Transformer over patches or frames."""

import math
from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from powernorm_lab.models.attention import MultiHeadAttention
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.layers import TransformerLayer, final_norm, norms_by_layer
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.models.placements import layer_places
from powernorm_lab.models.positions import sinusoidal_positions
from powernorm_lab.tasks.sequences.settings import SequenceArchitecture

POSITION_SCALE: Final = 0.1
"""Scale of the sinusoidal positions, small compared with the frames."""


class ConformerLayer(nn.Module):
    """A layer of a Conformer (Gulati et al. 2020): half-step feed-forward, attention, convolution.

    The compared norm is that of the convolution module; the others are LayerNorms. With a mask the
    convolution reads zeros at padding; otherwise the last frames of a series would depend on its
    padding.

    Args:
        shape: shape of the layers.
        norm: builds the norm of the convolution module.
        kernel_size: kernel size of the convolution in frames, odd.

    Shape:
        - x: (batch, frames, features)
        - padding_mask: bool, (batch, frames), True = padding; for the attention
        - norm_mask: the same for the convolution module; None treats padding as frames
        - output: as x
    """

    def __init__(self, shape: TransformerShape, norm: NormFactory, kernel_size: int) -> None:
        super().__init__()
        width = shape.num_features
        self.first = _feed_forward(shape)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, shape.num_heads, dropout=shape.attention_dropout)
        self.gate_norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, kernel_size, padding=kernel_size // 2, groups=width)
        self.norm = norm(width)
        self.output = nn.Linear(width, width)
        self.second = _feed_forward(shape)
        self.final_norm = nn.LayerNorm(width)
        self.dropout = Dropout(shape.dropout)

    def forward(
        self, x: Tensor, padding_mask: Tensor | None = None, norm_mask: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output."""
        x = x + self.dropout(self.first(x)) / 2
        x = x + self.dropout(self.attention(self.attention_norm(x), padding_mask=padding_mask))
        x = x + self.dropout(self._convolved(self.gate_norm(x), norm_mask))
        x = x + self.dropout(self.second(x)) / 2
        normalized: Tensor = self.final_norm(x)
        return normalized

    def _convolved(self, x: Tensor, norm_mask: Tensor | None) -> Tensor:
        y = F.glu(self.gate(x))
        if norm_mask is not None:
            y = y.masked_fill(norm_mask[..., None], 0)
        y = self.norm(self.conv(y.transpose(1, 2)).transpose(1, 2), norm_mask)
        output: Tensor = self.output(F.silu(y))
        return output


def _feed_forward(shape: TransformerShape) -> nn.Sequential:
    hidden = shape.feedforward_features
    return nn.Sequential(
        nn.LayerNorm(shape.num_features),
        nn.Linear(shape.num_features, hidden),
        nn.SiLU(),
        nn.Linear(hidden, shape.num_features),
    )


class SequenceClassifier(nn.Module):
    """Classifies a series by the mean over its frames or patches.

    Args:
        num_features: number of features of a frame.
        num_classes: number of classes.
        norm: builds the compared norms.
        shape: shape of the layers.
        architecture: `conformer`, `patch` or `encoder`.
        kernel_size: kernel size of the Conformer's convolutions in frames.
        patch_length: frames in a patch; the last patch of a series is padded with zeros.
        mask_padding: whether norms and convolutions of the Conformer ignore padding; attention and
            mean always do.
        seed: seed of the initial weights, which are the same for every norm.
        upper_norm: builds the norms above the lowest layers.
        qk_norm: builds the norms of queries and keys, if the shape has them.

    Shape:
        - series: (batch, frames, num_features)
        - padding_mask: bool, (batch, frames), True = padding, after the frames
        - output: logits, (batch, num_classes)
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        norm: NormFactory,
        shape: TransformerShape,
        *,
        architecture: SequenceArchitecture = "conformer",
        kernel_size: int = 7,
        patch_length: int = 4,
        mask_padding: bool = True,
        seed: int = 0,
        upper_norm: NormFactory | None = None,
        qk_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        self.patch_length = patch_length if architecture == "patch" else 1
        self.mask_padding = mask_padding
        self.has_positions = architecture != "conformer"
        width = shape.num_features
        self.up = nn.Conv1d(num_features, width, self.patch_length, stride=self.patch_length)
        self.final_norm: nn.Module | None = None
        if architecture == "conformer":
            layers: list[nn.Module] = [
                ConformerLayer(shape, norm, kernel_size) for _ in range(shape.num_layers)
            ]
        else:
            norms = norms_by_layer(norm, shape, upper_norm)
            layers = [
                TransformerLayer(shape, own, places=places, qk_norm=qk_norm)
                for own, places in zip(norms, layer_places(shape), strict=True)
            ]
            self.final_norm = final_norm(shape, norms[-1])
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, num_classes)
        generator = initialize(self, seed, shape.initialization)
        for module in self.modules():
            if isinstance(module, nn.Conv1d):  # torch's initialization, from the seed
                bound = 1 / math.sqrt(module.weight[0].numel())
                nn.init.uniform_(module.weight, -bound, bound, generator=generator)
                assert module.bias is not None
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)

    def forward(self, series: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the classes of each series."""
        states, mask = self._states(series, padding_mask)
        if mask is None:
            mean = states.mean(1)
        else:
            counts = (~mask).sum(1, keepdim=True).clamp(min=1)
            mean = states.masked_fill(mask[..., None], 0).sum(1) / counts
        logits: Tensor = self.head(mean)
        return logits

    def features(self, series: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the features before the mean, (batch, frames or patches, features)."""
        return self._states(series, padding_mask)[0]

    def _states(self, series: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output of the layers and its padding mask."""
        if mask is not None:
            series = series.masked_fill(mask[..., None], 0)
            mask = mask[:, :: self.patch_length]
        missing = -series.shape[1] % self.patch_length
        x = self.up(F.pad(series.transpose(1, 2), (0, missing))).transpose(1, 2)
        if self.has_positions:
            positions = sinusoidal_positions(x.shape[1], x.shape[2], device=x.device)
            x = x + POSITION_SCALE * positions
        norm_mask = mask if self.mask_padding else None
        for layer in self.layers:
            x = layer(x, mask, norm_mask) if isinstance(layer, ConformerLayer) else layer(x, mask)
        if self.final_norm is not None:
            x = self.final_norm(x, mask)
        return x, mask
