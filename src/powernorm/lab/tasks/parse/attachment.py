"""Scores of trees: how many words have the right head."""

from collections.abc import Mapping

import torch
from torch import Tensor

from powernorm.lab.data.corpus import Split
from powernorm.lab.tasks.parse.parsing import Parsed
from powernorm.lab.tasks.parse.trees import Trees


def attachment_scores(gold: Trees, parsed: Parsed) -> dict[str, float]:
    """Return the percentages of words that hang where they should.

    Punctuation does not count: by Penn Treebank's tags that is what Chen and Manning (2014) leave
    out, by Universal Dependencies' the tag PUNCT. The percentage is over all words of all
    sentences together.

    Returns:
        `uas`, the head is right; `las`, the head and the label are.
    """
    counted = gold.is_scored
    is_attached = (gold.heads == parsed.heads)[counted]
    is_labelled = is_attached & (gold.labels == parsed.labels)[counted]
    number = int(counted.sum())
    return {
        "uas": 100 * int(is_attached.sum()) / number,
        "las": 100 * int(is_labelled.sum()) / number,
    }


def neighbour_scores(trees: Mapping[Split, Trees]) -> dict[str, float]:
    """Return the `uas` of attaching every word to its neighbour, `valid_uas` and `test_uas`.

    The neighbour before it (the first word hangs from the root) or after it (the last one does),
    whichever is right more often in the train split.
    """
    found = {
        is_before: {
            split: attachment_scores(part, Parsed(_neighbours(part, is_before), part.labels))["uas"]
            for split, part in trees.items()
        }
        for is_before in (True, False)
    }
    best = max(found.values(), key=lambda scores: scores["train"])
    return {"valid_uas": best["valid"], "test_uas": best["test"]}


def _neighbours(trees: Trees, is_before: bool) -> Tensor:
    number = torch.arange(trees.heads.numel()) - trees.starts.repeat_interleave(trees.lengths) + 1
    if is_before:
        return number - 1
    is_last = number == trees.lengths.repeat_interleave(trees.lengths)
    return (number + 1).masked_fill(is_last, 0)
