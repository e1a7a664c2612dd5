"""A Transformer for language modeling, an adaptive softmax, and tensorized attention."""

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.layers import (
    AttentionLayer,
    TransformerLayer,
    embedding_norm,
    final_norm,
    norms_by_layer,
)
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.models.placements import LayerPlaces, layer_places
from powernorm_lab.models.positions import sinusoidal_positions


class LanguageModel(nn.Module):
    """Predicts each token from those before it.

    The model embeds tokens (scaled by √features) and positions, applies causal layers, and computes
    logits with the transposed token embedding. With most placements another norm follows the last
    layer. In evaluation no output depends on a later token, for any norm; in training, batch
    statistics carry information between positions.

    With a custom `attention`, such as that of the Tensorized Transformer, which uses only the
    distances of positions, there is no embedding of positions.

    Args:
        vocabulary_size: number of tokens.
        norm: builds every norm of the model, or of its lowest layers.
        shape: shape of the layers.
        max_length: maximal length of a sequence.
        seed: seed of the initial weights, which are the same for every norm.
        upper_norm: builds the norms above the lowest layers.
        attention: builds the attention of each layer, whose forward takes `(x, padding_mask=…)`;
            None is `MultiHeadAttention`.
        qk_norm: builds the norms of queries and keys, if the shape has them; None is the norm of
            the layer.

    Shape:
        - tokens: int64, (batch, length) with length ≤ max_length
        - padding_mask: bool, (batch, length), True = padding
        - output: logits, (batch, length, vocabulary_size)

    Raises:
        InputError: `num_heads` does not divide `num_features`, a sequence is too long, or the
            placement has norms or scales inside of the attention and `attention` is given.
    """

    def __init__(
        self,
        vocabulary_size: int,
        norm: NormFactory,
        shape: TransformerShape,
        *,
        max_length: int,
        seed: int = 0,
        upper_norm: NormFactory | None = None,
        attention: Callable[[], nn.Module] | None = None,
        qk_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        all_places = layer_places(shape)
        has_inner = shape.qk_norm or any(
            one.linears or one.heads or one.scales_heads for one in all_places
        )
        if attention is not None and has_inner:
            raise InputError(
                f"placement={shape.placement} with qk_norm={shape.qk_norm}: a custom attention "
                "has no place for norms or scales inside of it; choose other ones, or leave "
                "attention out"
            )
        norms = norms_by_layer(norm, shape, upper_norm)
        self.max_length = max_length
        self.embedding_scale = math.sqrt(shape.num_features)
        self.embedding = nn.Embedding(vocabulary_size, shape.num_features)
        self.positions = None if attention else nn.Embedding(max_length, shape.num_features)
        self.embedding_norm = embedding_norm(shape, norms[0])
        self.dropout = Dropout(shape.dropout)

        def layer(layer_norm: NormFactory, places: LayerPlaces) -> nn.Module:
            if attention is not None:
                return AttentionLayer(attention(), shape, layer_norm, places=places)
            return TransformerLayer(shape, layer_norm, causal=True, places=places, qk_norm=qk_norm)

        self.layers = nn.ModuleList(map(layer, norms, all_places))
        self.final_norm = final_norm(shape, norms[-1])
        initialize(self, seed, shape.initialization)
        self.head = nn.Linear(shape.num_features, vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the token after each position."""
        logits: Tensor = self.head(self.features(tokens, padding_mask))
        return logits

    def features(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the features before the output layer, (batch, length, features)."""
        length = tokens.shape[-1]
        if length > self.max_length:
            raise InputError(
                f"a sequence of {length} tokens is longer than max_length={self.max_length}: cut "
                "it or build the model with a larger max_length"
            )
        x: Tensor = self.embedding(tokens) * self.embedding_scale
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, padding_mask)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, padding_mask)
        if self.final_norm is not None:
            x = self.final_norm(x, padding_mask)
        return x


_DIVISION = 4
"""Factor by which the number of features falls from cluster to cluster (Grave et al. 2017)."""


class AdaptiveLanguageModel(nn.Module):
    """A language model with an adaptive softmax as its output (Grave et al. 2017).

    The first softmax has as classes the ids below the first cutoff, and the clusters between
    cutoffs. Each cluster has its own softmax, over features that are projected to 1/4, 1/16, … of
    their number. Frequent ids should be low, which is roughly true for byte-pair subwords in the
    order of their merges. The output's tables are not tied to the embedding, because clusters have
    other sizes.

    Args:
        model: language model; its output layer is not used.
        vocabulary_size: size of the model's vocabulary.
        cutoffs: first ids of the clusters, increasing; the last cluster ends with the vocabulary.
        seed: seed of the output's initial weights.

    Shape:
        - tokens: int64, (batch, length)
        - padding_mask: bool, (batch, length), True = padding
        - output: features, (batch, length, features), for `nll`

    Raises:
        InputError: the cutoffs do not fit the vocabulary, or there are too many for the features.
    """

    def __init__(
        self, model: LanguageModel, vocabulary_size: int, cutoffs: Sequence[int], *, seed: int = 0
    ) -> None:
        super().__init__()
        num_features = model.embedding.embedding_dim
        _check_cutoffs(vocabulary_size, num_features, cutoffs)
        self.model = model
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(
            num_features, vocabulary_size, list(cutoffs), div_value=_DIVISION
        )
        initialize(self.adaptive, seed)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the features for `nll`."""
        return self.features(tokens, padding_mask)

    def features(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the output of the layers, (batch, length, features)."""
        return self.model.features(tokens, padding_mask)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of the targets, 0-d float32.

        Args:
            outputs: output of `forward`.
            targets: int64, (batch, length); `IGNORED` targets do not count.
        """
        counted = targets != IGNORED
        # A function of the features even without targets.
        nll = outputs.float().sum() * 0.0
        if bool(counted.any()):
            likelihoods: Tensor = self.adaptive(outputs[counted], targets[counted]).output
            nll = -likelihoods.float().sum()
        if dist.is_available() and dist.is_initialized():
            # Clusters without targets do not run, but every process needs all gradients.
            nll = nll + sum(weight.sum() * 0.0 for weight in self.adaptive.parameters())
        return nll

    @torch.no_grad()
    def log_probabilities(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of all ids, (batch, length, vocabulary_size), detached."""
        flat: Tensor = self.adaptive.log_prob(outputs.flatten(0, 1))
        return flat.view(*outputs.shape[:2], -1)


def _check_cutoffs(vocabulary_size: int, num_features: int, cutoffs: Sequence[int]) -> None:
    written = ",".join(map(str, cutoffs))
    is_rising = list(cutoffs) == sorted({*cutoffs})
    if not cutoffs or not is_rising or cutoffs[0] < 1 or cutoffs[-1] >= vocabulary_size:
        raise InputError(
            f"adaptive_cutoffs={written} do not fit a vocabulary of {vocabulary_size}: give "
            f"increasing ids from 1 to {vocabulary_size - 1}"
        )
    if num_features < _DIVISION ** len(cutoffs):
        raise InputError(
            f"adaptive_cutoffs={written}: the last cluster would have less than one of the "
            f"{num_features} features; give fewer cutoffs"
        )


NUM_BLOCKS: Final = 4
"""Number of parts of a segment that are computed one after the other. A part skips the columns
after its end, so that 4 parts take 15/32 of the whole tensor's work and memory; more parts are
hardly faster."""
_BIAS_STD: Final = 0.02


class TensorizedAttention(nn.Module):
    """Attention whose weights are a tensor with three indices (core-1 of Ma et al. 2019).

    For token i of a segment

        T_ijk = Σ_r g_r [ (q_i + u)_r k_jr + (q_i + v)_r p_{i-j,r} ] v_kr

    with T_ijk = 0 for j > i or k > i. `output`, Linear(L² → C) without bias, maps the flattened
    L × L slice of the token. One linear map of the input without bias computes q, k and v; u and v
    (`content_bias`, `position_bias`) and g (`core_weight`) are learned. The published code of this
    model builds a causal mask and never applies it; `sees_future` does the same.

    Details that the papers do not specify are as in Transformer-XL, on which the model is based: p
    is a linear map without bias of the sinusoidal encoding of the distance i - j, with as many
    features as the input; u and v are initialized by normal noise with standard deviation 0.02, g
    by the softmax of normal noise. There is no dropout inside.

    A segment shorter than L uses the first columns, and the others are 0, so that its outputs equal
    those of the same tokens at the beginning of a whole segment.

    The whole tensor is never stored: the rows of a segment are computed in `NUM_BLOCKS` parts, each
    with the columns up to its end. Mapping the flattened slice takes 2 L² C operations for a token.
    Applying the map to the factors of the slice, which has rank R, before multiplying them would
    take 4 L R C: fewer only for R < L / 2, and without skipping later columns.

    Args:
        num_features: C, number of features.
        head_features: R.
        max_length: L.
        sees_future: whether to omit the causal mask.

    Shape:
        - x: (batch, length, C) with length ≤ L
        - output: the same
    """

    def __init__(
        self,
        num_features: int,
        head_features: int,
        max_length: int,
        *,
        sees_future: bool = False,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.sees_future = sees_future
        self.query_key_value = nn.Linear(num_features, 3 * head_features, bias=False)
        self.position = nn.Linear(num_features, head_features, bias=False)
        self.output = nn.Linear(max_length**2, num_features, bias=False)
        self.content_bias = nn.Parameter(torch.empty(head_features))
        self.position_bias = nn.Parameter(torch.empty(head_features))
        self.core_weight = nn.Parameter(torch.empty(head_features))
        self.draw_weights(torch.Generator().manual_seed(0))

    def branch_weights(self) -> list[Tensor]:
        """Return the weights of values and output, for DeepNorm."""
        num_others = 2 * len(self.core_weight)
        return [self.query_key_value.weight[num_others:], self.output.weight]

    @torch.no_grad()
    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw u, v and g."""
        self.content_bias.normal_(std=_BIAS_STD, generator=generator)
        self.position_bias.normal_(std=_BIAS_STD, generator=generator)
        noise = torch.empty_like(self.core_weight).normal_(generator=generator)
        self.core_weight.copy_(noise.softmax(0))

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the output of each position, from the pairs of positions that it attends to.

        The padding mask is not used: padding is at the end, and no token attends to a later one.

        Raises:
            InputError: there is a mask and no causal mask.
        """
        if padding_mask is not None and self.sees_future:
            raise InputError(
                "a tensorized attention that sees the future would see the padding, too: leave out "
                "the padding mask or sees_future"
            )
        length = x.shape[1]
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        content = (query + self.content_bias) * self.core_weight
        relative = (query + self.position_bias) * self.core_weight
        distances = self._distances(length, x)
        size = max(1, -(-length // NUM_BLOCKS))
        parts = []
        for first in range(0, length, size):
            end = min(first + size, length)
            seen = length if self.sees_future else end
            rows = torch.arange(first, end, device=x.device)[:, None]
            columns = torch.arange(seen, device=x.device)
            # g_r [(q_i + u)_r k_jr + (q_i + v)_r p_{i-j,r}], (batch, rows, columns, R)
            pairs = torch.addcmul(
                content[:, first:end, None] * key[:, None, :seen],
                relative[:, first:end, None],
                F.embedding(rows - columns + length - 1, distances),
            )
            slices = pairs.flatten(1, 2) @ value[:, :seen].transpose(1, 2)
            slices = slices.unflatten(1, (end - first, seen))
            if not self.sees_future:
                later = columns > rows
                slices = slices.masked_fill(later[:, :, None] | later[:, None, :], 0.0)
            parts.append(F.linear(slices.flatten(2), self._columns(seen)))
        return torch.cat(parts, dim=1)

    def _distances(self, length: int, x: Tensor) -> Tensor:
        """Return p for the distances 1 - length … length - 1, (2 length - 1, R)."""
        num_features = self.position.in_features
        encodings = sinusoidal_positions(
            2 * length - 1, num_features, first=1 - length, device=x.device
        )
        distances: Tensor = self.position(encodings.to(self.position.weight.dtype))
        return distances

    def _columns(self, seen: int) -> Tensor:
        """Return the weights of `output` for the pairs of the first columns, (C, seen²)."""
        columns = self.output.weight.view(-1, self.max_length, self.max_length)
        return columns[:, :seen, :seen].flatten(1)
