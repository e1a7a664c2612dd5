"""Precision, recall and F1 of entities, and baselines from the frequencies of tags."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from powernorm_lab.data.baselines import UnigramModel, WordTagModel
from powernorm_lab.data.corpus import Split
from powernorm_lab.runs import Baseline
from powernorm_lab.tasks.ner.encoding import EncodedEntities
from powernorm_lab.tasks.ner.tag_schemes import Span, spans_of


def span_scores(
    gold: Iterable[Sequence[Span]], found: Iterable[Sequence[Span]]
) -> dict[str, float]:
    """Return `f1`, `precision` and `recall` over the entities of all sentences, 0 to 100.

    A predicted entity is correct if a gold entity of the sentence has the same first word, last
    word and kind, as in conlleval. 0 / 0 is defined as 0.

    Args:
        gold: gold entities of each sentence.
        found: predicted entities of each sentence.
    """
    num_right = num_gold = num_found = 0
    for wanted, got in zip(gold, found, strict=True):
        num_right += len(set(wanted) & set(got))
        num_gold += len(wanted)
        num_found += len(got)
    precision, recall = num_right / max(num_found, 1), num_right / max(num_gold, 1)
    f1 = 2 * precision * recall / ((precision + recall) or 1)
    return {"f1": 100 * f1, "precision": 100 * precision, "recall": 100 * recall}


_SCORED: Sequence[Split] = ("valid", "test")


def entity_baselines(encoded: EncodedEntities) -> list[Baseline]:
    """Return loss and perplexity per word, F1, precision and recall of the valid and test splits.

    - `unigram`: frequencies of tags in the train split. The most frequent tag is `O`, so that it
      finds no entity.
    - `word`: the most frequent tag of each word, without context.
    """
    train = encoded.splits["train"]
    words, tags, num_tags = train.words.long(), train.tags.long(), len(encoded.tags)
    unigram = UnigramModel(tags, num_tags)
    by_word = WordTagModel(words, tags, encoded.num_words, num_tags)
    every_tag = torch.arange(num_tags)
    metrics: dict[str, dict[str, float | None]] = {"unigram": {}, "word": {}}
    for split in _SCORED:
        part = encoded.splits[split]
        asked, answers = part.words.long(), part.tags.long()
        priors = unigram.probabilities(every_tag).expand(len(asked), -1)
        of_words = by_word.probabilities(asked[:, None], every_tag[None])
        for name, table in (("unigram", priors), ("word", of_words)):
            loss = -float(table.gather(1, answers[:, None]).log().mean())
            metrics[name][f"{split}_perplexity"] = math.exp(loss)
            metrics[name][f"{split}_loss"] = loss
            scores = _scores(encoded, split, table.argmax(dim=1))
            metrics[name] |= {f"{split}_{score}": value for score, value in scores.items()}
    return [
        Baseline(name="unigram", metrics=metrics["unigram"]),
        Baseline(name="word", metrics=metrics["word"]),
    ]


def _scores(encoded: EncodedEntities, split: Split, tags: Tensor) -> dict[str, float]:
    sentences = encoded.corpus.sentences[split]
    lengths = [len(sentence.words) for sentence in sentences]
    found = [[encoded.tags[tag] for tag in row.tolist()] for row in tags.split(lengths)]
    return span_scores((s.spans for s in sentences), (spans_of(row, "iob") for row in found))
