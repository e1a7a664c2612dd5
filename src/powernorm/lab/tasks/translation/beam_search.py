"""Beam search for the best translations of a batch of sentences."""

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.subwords import END_ID
from powernorm.lab.engine.watching import evaluating
from powernorm.lab.tasks.translation.decoding_state import DecodingState
from powernorm.lab.tasks.translation.hypotheses import (
    EndedHypotheses,
    LiveHypotheses,
    best_candidates,
)
from powernorm.lab.tasks.translation.model import TranslationModel
from powernorm.lab.tasks.translation.settings import LengthNormalization

Length = TypeVar("Length", float, Tensor)

_IDLE: Final = 8
"""One in so many sentences may be done before the others move together: moving copies all keys
and values, waiting computes what nobody needs."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """How translations are searched.

    The score of a hypothesis of n tokens, its end mark included, is its log-probability divided by
    n^α (`power`) or ((5 + n) / 6)^α (`wu2016`; Wu et al. 2016, eq. 14). At each step the beam's
    best continuations that do not end go on; those that end and are among the best `beam_size` of
    all continuations are kept. A sentence is done when `beam_size` have ended, or sooner when no
    live one can reach the score of the last that is wanted. With a beam of 1 this is greedy
    decoding; with one as wide as there are translations it finds the best of all.

    Args:
        beam_size: hypotheses of a sentence at each step.
        length_normalization: which divisor.
        length_penalty: α, 0 or more.
        max_length_factor: a translation has at most factor · (tokens of its source) + offset
            tokens, end marks not counted. One that gets there is ended.
        max_length_offset: see there.
        num_best: how many translations of each sentence are wanted, at most `beam_size`.

    Raises:
        InputError: a number is out of its range.
    """

    beam_size: int = 5
    length_normalization: LengthNormalization = "power"
    length_penalty: float = 1.0
    max_length_factor: float = 1.0
    max_length_offset: int = 50
    num_best: int = 1

    def __post_init__(self) -> None:
        if self.beam_size < 1:
            raise InputError(f"beam_size={self.beam_size} must be 1 or more")
        if not 1 <= self.num_best <= self.beam_size:
            raise InputError(
                f"num_best={self.num_best} must be from 1 to beam_size={self.beam_size}: take a "
                "wider beam for more translations"
            )
        if self.length_normalization not in get_args(LengthNormalization):
            raise InputError(
                f"length_normalization={self.length_normalization!r} must be one of "
                f"{', '.join(get_args(LengthNormalization))}"
            )
        for name in ("length_penalty", "max_length_factor", "max_length_offset"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name}={getattr(self, name)} must be 0 or more")

    def divisor(self, length: Length) -> Length:
        """What the log-probability of so many tokens, the end mark included, is divided by."""
        if self.length_normalization == "wu2016":
            length = (length + 5) / 6
        divisor: Length = length**self.length_penalty
        return divisor

    def limit(self, source_length: int) -> int:
        """Most tokens of the translation of a source, both without their end marks."""
        return int(self.max_length_factor * source_length + self.max_length_offset)


class Hypothesis(NamedTuple):
    """A translation."""

    tokens: tuple[int, ...]
    """Without the end mark."""
    log_probability: float
    """The end mark's included."""
    score: float


@torch.inference_mode()
def beam_search(
    model: TranslationModel,
    source: Tensor,
    source_padding_mask: Tensor | None = None,
    search: BeamSearch | None = None,
) -> list[list[Hypothesis]]:
    """Return the best translations of each sentence, the best first.

    The model evaluates meanwhile, and is in the mode that it was in afterwards. Sentences do not
    influence each other.

    Args:
        model: on the device of `source`.
        source: int64, (batch, length).
        source_padding_mask: bool, (batch, length), True = padding.
        search: how; None is `BeamSearch()`.

    Returns:
        `num_best` a sentence, fewer where fewer exist, and at least one: where no continuation has
        a probability (a model that has diverged), the empty translation with scores of -inf.
    """
    search = search or BeamSearch()
    with evaluating(model):
        memory = model.encode(source, source_padding_mask)
        limits = _limits(source, source_padding_mask, search)
        ended = _search(
            search,
            model,
            model.begin(memory, source_padding_mask, search.beam_size),
            torch.tensor(limits, device=source.device),
            longest=max(limits, default=0),
        )
    return _hypotheses(ended, search.num_best)


def _limits(source: Tensor, padding_mask: Tensor | None, search: BeamSearch) -> list[int]:
    counted = source != END_ID
    if padding_mask is not None:
        counted &= ~padding_mask
    return [search.limit(length) for length in counted.sum(1).tolist()]


def _search(
    search: BeamSearch,
    model: TranslationModel,
    state: DecodingState,
    limits: Tensor,
    *,
    longest: int,
) -> EndedHypotheses:
    batch, device = len(limits), limits.device
    positions = model.positions(longest + 1, device)
    dtype = torch.promote_types(model.head.weight.dtype, torch.float32)
    live = LiveHypotheses(limits, search.beam_size, dtype)
    ended = EndedHypotheses(batch, search.beam_size, longest, dtype, device)
    newest = torch.full((batch, search.beam_size), END_ID, device=device)
    for step in range(longest + 1):
        logits = model.step(newest, positions[step], state).to(dtype)
        candidates = best_candidates(logits, live.log_probabilities, live.limits == step)
        scores, num_ended = ended.add(live, candidates, search.divisor(float(step + 1)))
        state.continue_from(live.continue_with(candidates))
        done = (num_ended == search.beam_size) | (
            _bound(live, search) <= scores[:, search.num_best - 1]
        )
        live.give_up(done)
        num_done = int(done.sum())
        if num_done == len(done):
            break
        if num_done * _IDLE >= len(done):
            rows = (~done).nonzero().squeeze(1)
            live.select(rows)
            state.select(rows)
        newest = live.tokens[..., -1]
    return ended


def _bound(live: LiveHypotheses, search: BeamSearch) -> Tensor:
    """Return a score that no live hypothesis can exceed, (batch,).

    Log-probabilities only fall, and are divided by most at the greatest length.
    """
    best = live.log_probabilities.amax(1)
    return best / search.divisor((live.limits + 1).to(best.dtype))


def _hypotheses(ended: EndedHypotheses, num_best: int) -> list[list[Hypothesis]]:
    columns = (ended.scores, ended.log_probabilities, ended.lengths, ended.tokens)
    scores, log_probabilities, lengths, tokens = (part[:, :num_best].tolist() for part in columns)
    found = []
    for sentence in zip(tokens, lengths, log_probabilities, scores, strict=True):
        all_of_it = [
            Hypothesis(tuple(row[:length]), log_probability, score)
            for row, length, log_probability, score in zip(*sentence, strict=True)
        ]
        possible = [hypothesis for hypothesis in all_of_it if hypothesis.score > -torch.inf]
        found.append(possible or [Hypothesis((), -torch.inf, -torch.inf)])
    return found
