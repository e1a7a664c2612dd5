"""A tagger of named entities: a Transformer encoder with directional attention and a CRF."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.models.attention import attended_positions
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.dropout import Dropout
from powernorm_lab.models.initialization import initialize
from powernorm_lab.models.layers import (
    AttentionLayer,
    embedding_norm,
    final_norm,
    norms_by_layer,
)
from powernorm_lab.models.normed import HeadScale, NormFactory
from powernorm_lab.models.placements import layer_places

# A conditional random field over the tags of a sentence (Lafferty et al. 2001).


FORBIDDEN: Final = -10_000.0
"""Score of a forbidden transition: its probability is 0 in every precision, and so is its gradient,
so that training does not change it."""


class TagSequences(nn.Module):
    """A linear-chain CRF over the tags of a sentence, from scores of every tag at every word.

    Only sequences that the tagging scheme allows have a probability, in training and in decoding
    (TENER forbids the others in decoding only).

    Args:
        starts: whether a sentence may begin with each tag.
        follows: whether the tag of the column may follow that of the row.
        ends: whether a sentence may end with each tag.
    """

    def __init__(
        self, starts: Sequence[bool], follows: Sequence[Sequence[bool]], ends: Sequence[bool]
    ) -> None:
        super().__init__()
        self.start_transitions = nn.Parameter(torch.empty(len(starts)))
        """Score of each tag at the beginning of a sentence."""
        self.end_transitions = nn.Parameter(torch.empty(len(ends)))
        """Score of each tag at the end of a sentence."""
        self.transitions = nn.Parameter(torch.empty(len(starts), len(starts)))
        """Score of the tag of the column after that of the row."""
        self._allowed = [torch.tensor(part) for part in (starts, ends, follows)]
        self.draw_weights(torch.Generator().manual_seed(0))

    @property
    def num_tags(self) -> int:
        """Return the number of tags."""
        return len(self.start_transitions)

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw the scores of the transitions, uniform within 0.1, from a generator."""
        parts = (self.start_transitions, self.end_transitions, self.transitions)
        for part, allowed in zip(parts, self._allowed, strict=True):
            nn.init.uniform_(part, -0.1, 0.1, generator=generator)
            with torch.no_grad():
                part.masked_fill_(~allowed.to(part.device), FORBIDDEN)

    def nll(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of all sentences, 0-d, at least float32.

        Args:
            scores: (batch, length, tags).
            targets: int64, (batch, length); `IGNORED` at padding, which is at the end of a row.
        """
        counted = targets != IGNORED
        rows = counted[:, 0]
        if not bool(rows.any()):
            # Every parameter needs a gradient in every process.
            return 0.0 * sum((part.sum() for part in self.parameters()), scores.float().sum())
        with torch.autocast(scores.device.type, enabled=False):
            kept, counted = _precise(scores[rows]), counted[rows]
            right = self._score(kept, targets[rows].clamp(min=0), counted)
            return (self._log_partition(kept, counted) - right).sum()

    def _score(self, scores: Tensor, tags: Tensor, counted: Tensor) -> Tensor:
        """Return the score of each row's sequence of tags, (batch,)."""
        of_words = scores.gather(2, tags[..., None]).squeeze(2)
        total = self.start_transitions[tags[:, 0]] + of_words[:, 0]
        for position in range(1, tags.shape[1]):
            step = (
                self.transitions[tags[:, position - 1], tags[:, position]] + of_words[:, position]
            )
            total = torch.where(counted[:, position], total + step, total)
        last = tags.gather(1, counted.sum(1, keepdim=True) - 1).squeeze(1)
        return total + self.end_transitions[last]

    def _log_partition(self, scores: Tensor, counted: Tensor) -> Tensor:
        """Return the logarithm of the sum over all sequences of exp(score), (batch,).

        The forward algorithm: `total[b, j]` sums over the sequences up to a word that end in tag j.
        """
        total = self.start_transitions + scores[:, 0]
        for position in range(1, scores.shape[1]):
            steps = total[:, :, None] + self.transitions + scores[:, position, None, :]
            total = torch.where(counted[:, position, None], steps.logsumexp(1), total)
        return (total + self.end_transitions).logsumexp(1)

    def decode(self, scores: Tensor, padding_mask: Tensor | None = None) -> list[list[int]]:
        """Return the most probable tags of every sentence (Viterbi), without padding.

        Args:
            scores: (batch, length, tags).
            padding_mask: (batch, length), True = padding, at the end of a row.
        """
        # On the CPU, because backtracking is a loop over single numbers.
        parts = (self.start_transitions, self.transitions, self.end_transitions)
        starts, transitions, ends = (_precise(part.detach()).cpu() for part in parts)
        kept = _precise(scores.detach()).cpu()
        lengths = [kept.shape[1]] * len(kept)
        if padding_mask is not None:
            lengths = (~padding_mask).sum(1).tolist()
        totals, origins = [starts + kept[:, 0]], []
        for position in range(1, kept.shape[1]):
            steps = totals[-1][:, :, None] + transitions + kept[:, position, None, :]
            total, origin = steps.max(1)
            totals.append(total)
            origins.append(origin)
        decoded: list[list[int]] = [[] for _ in lengths]
        for row, length in enumerate(lengths):
            if length:
                tag = int((totals[length - 1][row] + ends).argmax())
                decoded[row] = [tag]
                for origin in reversed(origins[: length - 1]):
                    tag = int(origin[row, tag])
                    decoded[row].insert(0, tag)
        return decoded


def _precise(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


# The attention of TENER (Yan et al. 2019), which depends on direction and distance.


class DirectionalAttention(nn.Module):
    """Self-attention whose weights depend on distance and direction of positions.

    With the query Q_t, the value V_j, and x_j itself, split into heads, as the key K_j, position t
    attends to position j of a sentence by (eq. 10-13 of the paper)

    `A_tj = Q_t K_jᵀ + Q_t R_{t-j}ᵀ + u K_jᵀ + v R_{t-j}ᵀ`, `softmax_j(A_tj) V_j`

    without the usual division by √d, which would make the weights less sharp. The sines of R
    (`offset_codes`) are odd, so that left and right differ; u and v are learned for each head. As
    in the authors' code, the heads are concatenated without an output projection.

    Args:
        num_features: number of features, divisible by `num_heads`.
        num_heads: number of heads.
        dropout: dropout of the attention weights, in training.
        scales_heads: whether each head has a learned scale.

    Shape:
        - x: (batch, length, features)
        - padding_mask: (batch, length), True = padding, which is not attended to
        - output: (batch, length, features)

    Raises:
        InputError: `num_heads` does not divide `num_features` into heads of an even size.
    """

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        scales_heads: bool = False,
    ) -> None:
        super().__init__()
        if num_features % (2 * num_heads):
            raise InputError(
                f"num_heads={num_heads} does not divide num_features={num_features} into heads of "
                "an even size, for equal numbers of sines and cosines: choose another"
            )
        self.num_heads = num_heads
        self.head_features = num_features // num_heads
        self.query = nn.Linear(num_features, num_features, bias=False)
        self.value = nn.Linear(num_features, num_features, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_features))
        """u."""
        self.offset_bias = nn.Parameter(torch.zeros(num_heads, 1, self.head_features))
        """v."""
        self.dropout = Dropout(dropout)
        self.head_scale = HeadScale(num_heads) if scales_heads else None

    def branch_weights(self) -> list[Tensor]:
        """Return the weight of the values, for DeepNorm; there is no output projection."""
        return [self.value.weight]

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw u and v, normal after Glorot and Bengio (2010), from a generator."""
        for bias in (self.content_bias, self.offset_bias):
            nn.init.xavier_normal_(bias.data.squeeze(1), generator=generator)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attend to all positions of `x` except padding."""
        query, keys, values = self._heads(self.query(x)), self._heads(x), self._heads(self.value(x))
        codes = offset_codes(x.shape[1], self.head_features, device=x.device).to(query.dtype)
        scores = (query + self.content_bias) @ keys.transpose(-1, -2)
        scores = scores + by_position((query + self.offset_bias) @ codes.T)
        if padding_mask is not None:
            scores = scores.masked_fill(~attended_positions(padding_mask), -torch.inf)
        attended: Tensor = self.dropout(scores.softmax(dim=-1)) @ values
        side_by_side = attended.transpose(1, 2).flatten(2)
        return side_by_side if self.head_scale is None else self.head_scale(side_by_side)

    def _heads(self, x: Tensor) -> Tensor:
        """Reshape (batch, length, features) to (batch, heads, length, features of a head)."""
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_features).transpose(1, 2)


def offset_codes(length: int, num_features: int, *, device: torch.device | None = None) -> Tensor:
    """Return R for all offsets t - j, from length - 1 down to 1 - length, in float32.

    Features i and i + C/2 of an offset are the sine and cosine of (t - j) / 10000^(2i / C), as in
    the paper's code except for the order of features.

    Args:
        length: length of a sentence.
        num_features: C, even.
        device: device of the result.

    Returns:
        (2 · length - 1, num_features); row length - 1 + j - t is that of the offset t - j.

    >>> offset_codes(2, 2)
    tensor([[ 0.8415,  0.5403],
            [ 0.0000,  1.0000],
            [-0.8415,  0.5403]])
    """
    offsets = torch.arange(length - 1, -length, -1, device=device, dtype=torch.float32)
    even = torch.arange(0, num_features, 2, device=device, dtype=torch.float32)
    angles = offsets[:, None] * 10000 ** (-even / num_features)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def by_position(scores: Tensor) -> Tensor:
    """Convert scores by offset to scores by position.

    Args:
        scores: (…, length, 2 · length - 1); column length - 1 + j - t of row t is for position j.

    Returns:
        (…, length, length).
    """
    length = scores.shape[-2]
    if length == 1:
        return scores
    # Each row's window starts one column before that of the previous row. In the flattened scores,
    # reshaped to rows that are one column shorter, all windows start at the same column.
    flat = scores.flatten(-2)[..., length - 1 : -1]
    return flat.reshape(*scores.shape[:-1], 2 * length - 2)[..., :length]


WINDOW = 3
"""Width of the filters in characters."""


class CharacterFeatures(nn.Module):
    """A convolution over the characters of a word with max pooling (Ma and Hovy 2016).

    The convolution is a linear map of every `WINDOW` neighboring characters, followed by ReLU. The
    maximum is over the characters of the word, without padding.

    Args:
        num_characters: number of ids; 0 is padding.
        num_features: number of features of a character, and of a word.
        dropout: dropout of the characters' embeddings, in training.

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
        # Features are not negative, so that zeros at padding do not change the maximum.
        return (found * is_there).amax(dim=-2)


class EntityTagger(nn.Module):
    """Tags every word of a sentence (TENER, Yan et al. 2019).

    Embeddings of words, optional embeddings of bigrams and optional features of characters are
    concatenated and projected to the width of the encoder. Its layers are followed by a linear map
    to scores of tags and a conditional random field. With most placements another norm follows the
    last layer.

    Args:
        num_words: number of ids of words; 0 is padding.
        tags: conditional random field over the tags.
        norm: builds every norm of the model, or of its lowest layers.
        shape: shape of the layers.
        embedding_features: size of a word's embedding; None is that of the layers.
        embedding_dropout: dropout of the embeddings of words and bigrams, in training; None is that
            of the layers.
        output_dropout: dropout before the scores, in training.
        num_characters: number of ids of characters; 0 is padding.
        character_features: number of features from a word's characters; 0 for none.
        character_dropout: dropout of characters, in training; None is `embedding_dropout`.
        num_bigrams: number of ids of bigrams; 0 is padding.
        bigram_features: size of a bigram's embedding; 0 for none.
        seed: seed of the initial weights, which are the same for every norm.
        upper_norm: builds the norms above the lowest layers.

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
        self.head = nn.Linear(num_features, tags.num_tags)
        self.tags = tags
        initialize(self, seed, shape.initialization)

    def forward(
        self,
        tokens: Tensor,
        characters: Tensor | None = None,
        padding_mask: Tensor | None = None,
        bigrams: Tensor | None = None,
    ) -> Tensor:
        """Return the scores of the tags of every word, for `nll` and `decode`."""
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
        """Return the features before the output layer, (batch, length, num_features)."""
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
            outputs: output of `forward`.
            targets: int64, (batch, length): ids of tags; -100 at padding, at the end of a row.
        """
        return self.tags.nll(outputs, targets)

    def decode(self, outputs: Tensor, padding_mask: Tensor | None = None) -> list[list[int]]:
        """Return the most probable ids of tags of every sentence, without padding."""
        return self.tags.decode(outputs, padding_mask)
