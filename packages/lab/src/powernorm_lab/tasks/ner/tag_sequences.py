"""A conditional random field over the tags of a sentence (Lafferty et al. 2001)."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from powernorm_lab.data.batch import IGNORED

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
