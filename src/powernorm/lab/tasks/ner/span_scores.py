"""Precision, recall and F1 of entities, by seqeval."""

from collections.abc import Sequence

from seqeval.metrics.sequence_labeling import precision_recall_fscore_support


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
