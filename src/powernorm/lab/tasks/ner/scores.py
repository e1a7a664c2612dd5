"""Precision, recall and F1 of entities, and what a tagger has to beat: frequencies of the tags."""

import math
from collections.abc import Sequence

import torch
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
from torch import Tensor

from powernorm.lab.data.baselines import UnigramModel, WordTagModel
from powernorm.lab.data.corpus import Split
from powernorm.lab.tasks.ner.encoding import EncodedEntities
from powernorm.lab.tasks.ner.tag_schemes import tags_of
from powernorm.runs import Baseline


def span_scores(gold: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `f1`, `precision` and `recall` over the entities of all sentences, 0 to 100.

    An entity that was found counts where its first word, its last word and its kind are those of
    one of the sentence. Tags that fit no scheme are read as the CoNLL evaluation reads them. What
    would be 0 / 0 is 0.

    Args:
        gold: tags of each sentence.
        found: the same, as many.
    """
    precision, recall, f1, _ = precision_recall_fscore_support(
        [list(tags) for tags in gold],
        [list(tags) for tags in found],
        average="micro",
        zero_division=0,
    )
    scores = {"f1": f1, "precision": precision, "recall": recall}
    return {name: 100 * float(value) for name, value in scores.items()}


_SCORED: Sequence[Split] = ("valid", "test")


def entity_baselines(encoded: EncodedEntities) -> list[Baseline]:
    """Return loss and perplexity per word, and F1, precision and recall, of valid and test.

    - `unigram`: the frequencies of the tags in the train split. The most frequent one is `O`, so it
      finds no entity.
    - `word`: the most frequent tag of each word, whatever stands beside it.
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
    names = encoded.tags
    sentences = encoded.corpus.sentences[split]
    lengths = [len(sentence.words) for sentence in sentences]
    found = [[names[tag] for tag in row.tolist()] for row in tags.split(lengths)]
    return span_scores([tags_of(s.spans, len(s.words)) for s in sentences], found)
