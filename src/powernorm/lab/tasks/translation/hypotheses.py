"""The hypotheses of a beam search: those that grow, and the best of those that have ended."""

from typing import NamedTuple

import torch
from torch import Tensor

from powernorm.lab.data.subwords import END_ID


class Candidates(NamedTuple):
    """The best continuations of a sentence's hypotheses, best first, each (batch, candidates)."""

    log_probabilities: Tensor
    origins: Tensor
    """Which hypothesis is continued."""
    tokens: Tensor
    """By what."""


def best_candidates(logits: Tensor, live: Tensor, closing: Tensor) -> Candidates:
    """Return twice as many continuations as there are hypotheses, so that enough do not end.

    Args:
        logits: of the next token, (batch, beam, vocabulary).
        live: log-probabilities of the hypotheses, (batch, beam).
        closing: sentences whose hypotheses have to end now, (batch,).
    """
    beam_size, vocabulary_size = logits.shape[1:]
    values, tokens = _top_logits(logits, min(2 * beam_size, vocabulary_size))
    ending = torch.full_like(values, -torch.inf)
    ending[..., 0] = logits[..., END_ID]
    closed = closing[:, None, None]
    values = torch.where(closed, ending, values)
    tokens = tokens.masked_fill(closed, END_ID)
    scores = values + (live - logits.logsumexp(-1))[..., None]
    # A model that has diverged gives NaN: such a hypothesis is as good as impossible.
    scores = scores.masked_fill(scores.isnan(), -torch.inf).flatten(1)
    best = scores.topk(min(2 * beam_size, scores.shape[1]))
    origins = best.indices // values.shape[-1]
    return Candidates(best.values, origins, tokens.flatten(1).gather(1, best.indices))


def _top_logits(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits and their tokens, each (batch, beam, number)."""
    top = logits.topk(number)
    return top.values, top.indices


class LiveHypotheses:
    """The hypotheses that grow, a beam for each sentence.

    Args:
        limits: most tokens of a sentence's translation, without the end mark, (batch,).
        beam_size: hypotheses of a sentence. They are all empty at first, and all but one count as
            impossible, for equal ones are one.
        dtype: of log-probabilities.
    """

    def __init__(self, limits: Tensor, beam_size: int, dtype: torch.dtype) -> None:
        batch, device = len(limits), limits.device
        self.limits = limits
        self.sentences = torch.arange(batch, device=device)
        self.log_probabilities = torch.full(
            (batch, beam_size), -torch.inf, dtype=dtype, device=device
        )
        self.log_probabilities[:, 0] = 0
        self.tokens = torch.empty(batch, beam_size, 0, dtype=torch.int64, device=device)

    def continue_with(self, candidates: Candidates) -> Tensor:
        """Grow by the best candidates that do not end; return which hypotheses these continue."""
        growing = candidates.log_probabilities.masked_fill(candidates.tokens == END_ID, -torch.inf)
        self.log_probabilities, best = growing.topk(self.tokens.shape[1])
        origins = candidates.origins.gather(1, best)
        newest = candidates.tokens.gather(1, best)
        self.tokens = torch.cat((rows_of(self.tokens, origins), newest[..., None]), dim=-1)
        return origins

    def give_up(self, sentences: Tensor) -> None:
        """Continue none of these sentences, (batch,) bool."""
        self.log_probabilities = self.log_probabilities.masked_fill(sentences[:, None], -torch.inf)

    def select(self, rows: Tensor) -> None:
        """Keep these sentences only."""
        self.limits = self.limits.index_select(0, rows)
        self.sentences = self.sentences.index_select(0, rows)
        self.log_probabilities = self.log_probabilities.index_select(0, rows)
        self.tokens = self.tokens.index_select(0, rows)


class EndedHypotheses:
    """The best hypotheses that have ended, a beam for each sentence, best first.

    Args:
        batch: number of sentences.
        beam_size: hypotheses of a sentence; those that are missing have a score of -inf.
        longest: most tokens of a translation.
        dtype: of scores.
        device: of all.
    """

    def __init__(
        self, batch: int, beam_size: int, longest: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (batch, beam_size)
        self.scores = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        self.log_probabilities = self.scores.clone()
        self.lengths = torch.zeros(shape, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(*shape, longest, dtype=torch.int64, device=device)

    def add(
        self, live: LiveHypotheses, candidates: Candidates, divisor: float
    ) -> tuple[Tensor, Tensor]:
        """Take up the candidates that end and are among the best of a beam.

        Args:
            live: before they continue.
            candidates: of them.
            divisor: of log-probabilities, for scores.

        Returns:
            Of each live sentence the scores so far, (batch, beam), and how many have ended.
        """
        beam_size = self.scores.shape[1]
        log_probabilities, origins, tokens = (part[:, :beam_size] for part in candidates)
        scores = (log_probabilities / divisor).masked_fill(tokens != END_ID, -torch.inf)
        rows, length = live.sentences, live.tokens.shape[-1]
        kept, best = torch.cat((self.scores[rows], scores), dim=1).topk(beam_size)
        self.scores[rows] = kept
        joined = torch.cat((self.log_probabilities[rows], log_probabilities), dim=1)
        self.log_probabilities[rows] = joined.gather(1, best)
        joined = torch.cat((self.lengths[rows], torch.full_like(tokens, length)), dim=1)
        self.lengths[rows] = joined.gather(1, best)
        old = self.tokens[rows, :, :length]
        joined = torch.cat((old, rows_of(live.tokens, origins)), dim=1)
        self.tokens[rows, :, :length] = rows_of(joined, best)
        return kept, (kept > -torch.inf).sum(1)


def rows_of(tokens: Tensor, rows: Tensor) -> Tensor:
    """Return the chosen hypotheses of each sentence; tokens: (batch, beam, length)."""
    return tokens.gather(1, rows[..., None].expand(-1, -1, tokens.shape[-1]))
