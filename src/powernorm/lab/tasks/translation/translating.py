"""Translations of many sentences by beam search, shared among processes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from powernorm.lab.engine.processes import gather, num_processes, rank
from powernorm.lab.tasks.translation.batches import padded_sources
from powernorm.lab.tasks.translation.beam_search import BeamSearch, Hypothesis, beam_search
from powernorm.lab.tasks.translation.model import TranslationModel
from powernorm.lab.tasks.translation.settings import DecodingSettings


@dataclass(frozen=True)
class Translations:
    """What a search found."""

    hypotheses: list[list[Hypothesis]]
    """Of each sentence the best ones, best first."""
    num_tokens: int
    """Subwords of the best ones, end marks included."""
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed of the search."""
        return self.num_tokens / self.seconds if self.seconds > 0 and self.num_tokens else None


def translate_ids(
    model: TranslationModel,
    sources: Sequence[Sequence[int]],
    config: DecodingSettings,
    device: torch.device,
    *,
    num_best: int = 1,
) -> Translations:
    """Translate sentences given as ids, without end marks.

    Sentences of like length are searched together. Of several processes each takes every so many
    batches; all return all translations.

    Args:
        model: on the device.
        sources: ids of each sentence.
        config: how to search.
        device: of the model.
        num_best: hypotheses of a sentence.
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


def batches_by_length(sources: Sequence[Sequence[int]], batch_tokens: int) -> list[list[int]]:
    """Return the numbers of the sentences of each batch, longest sentences first.

    A batch has at most `batch_tokens` positions, padding and end marks included; a longer sentence
    makes one of its own.
    """
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
    batches: list[list[int]] = []
    for index in order:
        longest = len(sources[batches[-1][0]]) + 1 if batches else 0
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
