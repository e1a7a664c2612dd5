"""Beam search for translations of a batch of sentences, and of many sentences by processes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.data.subwords import END_ID
from powernorm_lab.engine.between_steps import evaluating
from powernorm_lab.engine.processes import gather, num_processes, rank
from powernorm_lab.tasks.translation.data import EncodedPairs, TokenLists
from powernorm_lab.tasks.translation.model import DecodingState, TranslationModel
from powernorm_lab.tasks.translation.settings import DecodingSettings, LengthNormalization

# Hypotheses of a beam search: live ones, and the best of the ended ones.


class Candidates(NamedTuple):
    """The best continuations of a sentence's hypotheses, best first, each (batch, candidates)."""

    log_probabilities: Tensor
    origins: Tensor
    """Numbers of the continued hypotheses."""
    tokens: Tensor
    """Next tokens."""


def best_candidates(logits: Tensor, live: Tensor, closing: Tensor) -> Candidates:
    """Return twice as many continuations as there are hypotheses, so that enough do not end.

    Args:
        logits: logits of the next token, (batch, beam, vocabulary).
        live: log-probabilities of the hypotheses, (batch, beam).
        closing: mask of sentences whose hypotheses must end now, (batch,).
    """
    beam_size, vocabulary_size = logits.shape[1:]
    values, tokens = _top_logits(logits, min(2 * beam_size, vocabulary_size))
    ending = torch.full_like(values, -torch.inf)
    ending[..., 0] = logits[..., END_ID]
    closed = closing[:, None, None]
    values = torch.where(closed, ending, values)
    tokens = tokens.masked_fill(closed, END_ID)
    scores = values + (live - logits.logsumexp(-1))[..., None]
    # A diverged model returns NaN: treat such a hypothesis as impossible.
    scores = scores.masked_fill(scores.isnan(), -torch.inf).flatten(1)
    best = scores.topk(min(2 * beam_size, scores.shape[1]))
    origins = best.indices // values.shape[-1]
    return Candidates(best.values, origins, tokens.flatten(1).gather(1, best.indices))


def _top_logits(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits and their tokens, each (batch, beam, number)."""
    top = logits.topk(number)
    return top.values, top.indices


class LiveHypotheses:
    """The live hypotheses, a beam for each sentence.

    Args:
        limits: maximal number of tokens of each translation, without the end mark, (batch,).
        beam_size: hypotheses of a sentence. At first all are empty; all but one have probability
            0, since they are equal.
        dtype: dtype of log-probabilities.
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
        """Continue with the best candidates that do not end; return the hypotheses continued."""
        growing = candidates.log_probabilities.masked_fill(candidates.tokens == END_ID, -torch.inf)
        self.log_probabilities, best = growing.topk(self.tokens.shape[1])
        origins = candidates.origins.gather(1, best)
        newest = candidates.tokens.gather(1, best)
        self.tokens = torch.cat((rows_of(self.tokens, origins), newest[..., None]), dim=-1)
        return origins

    def give_up(self, sentences: Tensor) -> None:
        """Give the hypotheses of these sentences probability 0, (batch,) bool."""
        self.log_probabilities = self.log_probabilities.masked_fill(sentences[:, None], -torch.inf)

    def select(self, rows: Tensor) -> None:
        """Keep only these sentences."""
        self.limits = self.limits.index_select(0, rows)
        self.sentences = self.sentences.index_select(0, rows)
        self.log_probabilities = self.log_probabilities.index_select(0, rows)
        self.tokens = self.tokens.index_select(0, rows)


class EndedHypotheses:
    """The best ended hypotheses, a beam for each sentence, best first.

    Args:
        batch: number of sentences.
        beam_size: hypotheses of a sentence; missing ones have a score of -inf.
        longest: maximal number of tokens of a translation.
        dtype: dtype of scores.
        device: device of all tensors.
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
        """Add the candidates that end and are among the best `beam_size` ones.

        Args:
            live: live hypotheses, before they continue.
            candidates: candidates of the live hypotheses.
            divisor: divisor of log-probabilities, for scores.

        Returns:
            For each live sentence the scores of ended hypotheses, (batch, beam), and their number.
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


Length = TypeVar("Length", float, Tensor)

_IDLE: Final = 8
"""Done sentences are removed when they are 1 in this many: removing copies all keys and values, and
keeping them computes unused hypotheses."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Settings of a beam search.

    The score of a hypothesis of n tokens, including its end mark, is its log-probability divided by
    n^α (`power`) or ((5 + n) / 6)^α (`wu2016`; Wu et al. 2016, eq. 14). At each step the beam
    continues with the best continuations that do not end; ended ones among the best `beam_size` of
    all continuations are kept. A sentence is done when `beam_size` hypotheses have ended, or when
    no live one can exceed the score of the last of the `num_best`. A beam of 1 is greedy decoding;
    a beam as large as the number of translations is an exhaustive search.

    Args:
        beam_size: hypotheses of a sentence at each step.
        length_normalization: kind of divisor.
        length_penalty: α, 0 or more.
        max_length_factor: a translation has at most factor · (tokens of its source) + offset
            tokens, without end marks, and ends at this length.
        max_length_offset: offset in the same formula.
        num_best: number of translations to return for each sentence, at most `beam_size`.

    Raises:
        InputError: a number is out of range.
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
                f"num_best={self.num_best} must be from 1 to beam_size={self.beam_size}: use a "
                "larger beam for more translations"
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
        """Return the divisor of the log-probability of `length` tokens, including the end mark."""
        if self.length_normalization == "wu2016":
            length = (length + 5) / 6
        divisor: Length = length**self.length_penalty
        return divisor

    def limit(self, source_length: int) -> int:
        """Return the maximal length of the translation of a source, both without end marks."""
        return int(self.max_length_factor * source_length + self.max_length_offset)


class Hypothesis(NamedTuple):
    """A translation."""

    tokens: tuple[int, ...]
    """Tokens without the end mark."""
    log_probability: float
    """Log-probability, including that of the end mark."""
    score: float


@torch.inference_mode()
def beam_search(
    model: TranslationModel,
    source: Tensor,
    source_padding_mask: Tensor | None = None,
    search: BeamSearch | None = None,
) -> list[list[Hypothesis]]:
    """Return the best translations of each sentence, the best first.

    The model is in evaluation mode during the search; its mode is restored afterwards. Sentences do
    not influence each other.

    Args:
        model: model on the device of `source`.
        source: int64, (batch, length).
        source_padding_mask: bool, (batch, length), True = padding.
        search: settings; None is `BeamSearch()`.

    Returns:
        For each sentence `num_best` translations, fewer if fewer exist, and at least one: the empty
        translation with scores of -inf if no continuation is possible (a diverged model).
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

    Log-probabilities only decrease, and the divisor is largest at the maximal length.
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


# Many sentences, divided among processes.


@dataclass(frozen=True)
class Translations:
    """Results of a search."""

    hypotheses: list[list[Hypothesis]]
    """The best hypotheses of each sentence, best first."""
    num_tokens: int
    """Number of subwords of the best hypotheses, including end marks."""
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Return the throughput of the search."""
        return self.num_tokens / self.seconds if self.seconds > 0 and self.num_tokens else None


@dataclass(frozen=True)
class SplitTranslations:
    """Sentences of a split with their references and translations, as text."""

    sources: list[str]
    references: list[str]
    translations: list[str]
    tokens_per_second: float | None
    """Throughput of the search."""


def translate_split(
    model: nn.Module,
    encoded: EncodedPairs,
    split: EvaluatedSplit,
    config: DecodingSettings,
    device: torch.device,
    *,
    rows: Tensor | None = None,
) -> SplitTranslations:
    """Translate the sentences of a split; every process calls it.

    Args:
        model: model on the device.
        encoded: the encoded corpus.
        split: split to translate.
        config: settings of the search.
        device: device of the model.
        rows: numbers of the pairs to translate, int64, (pairs,); None is all.
    """
    if not isinstance(model, TranslationModel):
        raise TypeError(f"expected a TranslationModel, got {type(model).__name__}")
    pairs = encoded.splits[split]
    indices = list(range(len(pairs))) if rows is None else rows.tolist()
    ids = [pairs.source.row(index)[:-1].tolist() for index in indices]
    found = translate_ids(model, ids, config, device)
    sources, references = encoded.sources(split), encoded.references(split)
    return SplitTranslations(
        [sources[index] for index in indices],
        [references[index] for index in indices],
        encoded.target_subwords.decode([best[0].tokens for best in found.hypotheses]),
        found.tokens_per_second,
    )


def translate_ids(
    model: TranslationModel,
    sources: Sequence[Sequence[int]],
    config: DecodingSettings,
    device: torch.device,
    *,
    num_best: int = 1,
) -> Translations:
    """Translate sentences given as ids, without end marks.

    Sentences of similar length are in a batch. Several processes divide the batches among them, and
    all of them return all translations.

    Args:
        model: model on the device.
        sources: ids of each sentence.
        config: settings of the search.
        device: device of the model.
        num_best: number of hypotheses to return for each sentence.
    """
    started = time.perf_counter()
    search = BeamSearch(
        beam_size=config.beam_size,
        length_normalization=config.length_normalization,
        length_penalty=config.length_penalty,
        max_length_factor=config.max_length_factor,
        max_length_offset=config.max_length_offset,
        num_best=num_best,
    )
    found: dict[int, list[Hypothesis]] = {}
    own = batches_by_length(sources, config.batch_tokens)[rank() :: num_processes()]
    for indices in own:
        source, mask = padded_sources([sources[index] for index in indices])
        mask = None if mask is None else mask.to(device)
        best = beam_search(model, source.to(device), mask, search)
        found |= zip(indices, best, strict=True)
    merged = {index: best for part in gather(found) for index, best in part.items()}
    ordered = [merged[index] for index in range(len(sources))]
    num_tokens = sum(len(best[0].tokens) + 1 for best in ordered)
    return Translations(ordered, num_tokens, time.perf_counter() - started)


def padded_sources(sentences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Return the source side of a batch: sentences with end marks, and their padding mask.

    Args:
        sentences: ids without end marks, at least one sentence.
    """
    return TokenLists.from_lists(sentences).padded(torch.arange(len(sentences)))


def batches_by_length(sources: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Return the numbers of the sentences of each batch, longest sentences first.

    A batch has at most `batch_tokens` positions, including padding and end marks; a longer sentence
    is a batch by itself.
    """
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
    batches: list[list[int]] = []
    for index in order:
        longest = len(sources[batches[-1][0]]) + 1 if batches else 0
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
