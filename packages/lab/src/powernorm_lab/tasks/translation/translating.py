"""Translation of many sentences by beam search, divided among processes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.engine.processes import gather, num_processes, rank
from powernorm_lab.tasks.translation.beam_search import BeamSearch, Hypothesis, beam_search
from powernorm_lab.tasks.translation.model import TranslationModel
from powernorm_lab.tasks.translation.sentence_pairs import EncodedPairs
from powernorm_lab.tasks.translation.settings import DecodingSettings
from powernorm_lab.tasks.translation.token_lists import TokenLists


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
