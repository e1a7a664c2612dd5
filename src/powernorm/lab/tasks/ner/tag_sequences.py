"""A conditional random field over the tags of a sentence (Lafferty et al. 2001)."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torchcrf import CRF

from powernorm.lab.data.batch import IGNORED

FORBIDDEN: Final = -10_000.0
"""Score of a transition that cannot be: its probability is 0 in every precision, and so is its
gradient, so that it stays."""


class TagSequences(nn.Module):
    """Which sequence of tags a sentence has, from scores of every tag at every word.

    The probability is over the sequences that the scheme of the tags allows, in training and in
    decoding alike (TENER forbids the others in decoding alone).

    Args:
        starts: whether a sentence may begin with a tag.
        follows: whether after the tag of the row that of the column may stand.
        ends: whether a sentence may end with a tag.
    """

    def __init__(
        self, starts: Sequence[bool], follows: Sequence[Sequence[bool]], ends: Sequence[bool]
    ) -> None:
        super().__init__()
        self.crf = CRF(len(starts), batch_first=True)
        self._allowed = [torch.tensor(part) for part in (starts, ends, follows)]
        self.draw_weights(torch.Generator().manual_seed(0))

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw the scores of the transitions, uniform within 0.1, from a generator."""
        parts = (self.crf.start_transitions, self.crf.end_transitions, self.crf.transitions)
        for part, allowed in zip(parts, self._allowed, strict=True):
            nn.init.uniform_(part, -0.1, 0.1, generator=generator)
            with torch.no_grad():
                part.masked_fill_(~allowed.to(part.device), FORBIDDEN)

    def nll(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of all sentences, 0-d, in float32 at least.

        Args:
            scores: (batch, length, tags).
            targets: int64, (batch, length); `IGNORED` at padding, which is at the end of a row.
        """
        counted = targets != IGNORED
        rows = counted[:, 0]
        if not bool(rows.any()):
            # So that every parameter has a gradient in every process.
            return 0.0 * sum((part.sum() for part in self.parameters()), scores.float().sum())
        with torch.autocast(scores.device.type, enabled=False):
            likelihood: Tensor = self.crf(
                _precise(scores[rows]), targets[rows].clamp(min=0), mask=counted[rows]
            )
        return -likelihood

    def decode(self, scores: Tensor, padding_mask: Tensor | None = None) -> list[list[int]]:
        """Return the most probable tags of every sentence (Viterbi), padding left out.

        Args:
            scores: (batch, length, tags).
            padding_mask: (batch, length), True = padding, at the end of a row.
        """
        if padding_mask is None:
            padding_mask = torch.zeros(scores.shape[:2], dtype=torch.bool, device=scores.device)
        rows = ~padding_mask[:, 0]
        decoded: list[list[int]] = []
        if bool(rows.any()):
            # On the CPU, for it is a loop over single numbers.
            kept = _precise(scores[rows]).cpu(), ~padding_mask[rows].cpu()
            decoded = self._on_cpu().decode(kept[0], mask=kept[1])
        found = iter(decoded)
        return [next(found) if is_there else [] for is_there in rows.tolist()]

    def _on_cpu(self) -> CRF:
        if self.crf.transitions.device.type == "cpu":
            return self.crf
        copy = CRF(self.crf.num_tags, batch_first=True)
        copy.load_state_dict(self.crf.state_dict())
        return copy


def _precise(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()
