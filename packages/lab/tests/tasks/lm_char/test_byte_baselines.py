import math

import pytest
import torch
from torch import Tensor

from powernorm_lab.tasks.lm_char import task as byte_baselines
from powernorm_lab.tasks.lm_char.data import FIRST, EncodedBytes
from powernorm_lab.tasks.lm_char.task import ORDERS, ByteCounts, byte_metrics


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def naive(train: list[int], text: list[int], weights: list[float]) -> float:
    """Compute the negative log-likelihood byte by byte."""
    order = len(weights)
    train, text = [FIRST] * 2 + train, [FIRST] * 2 + text
    total = 0.0
    for i in range(2, len(text)):
        terms = []
        for number in range(order):
            context = text[i - number : i]
            places = [j for j in range(2, len(train)) if train[j - number : j] == context]
            if number == 0:
                seen = sum(train[j] == text[i] for j in places)
                terms.append((weights[0], (seen + 1) / (len(places) + 256)))
            elif places:
                hits = sum(train[j] == text[i] for j in places)
                terms.append((weights[number], hits / len(places)))
        scale = sum(weight for weight, _ in terms)
        total -= math.log(sum(weight * share for weight, share in terms) / scale)
    return total


TRAIN = "the cat sat on the mat, the rat ate that\n"
VALID = "a cat ate the rat on that mat"


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_against_counting_by_hand(order: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_baselines, "_CHUNK", chunk)
    counts = ByteCounts(as_bytes(TRAIN), as_bytes(VALID))
    weights = counts.weights[order].tolist()
    assert sum(weights) == pytest.approx(1)
    for text in (VALID, "that rat", "zqz the"):
        expected = naive(list(TRAIN.encode()), list(text.encode()), weights)
        assert counts.nll(as_bytes(text), order) == pytest.approx(expected)


def test_weights_make_the_valid_split_most_likely() -> None:
    # All of its pairs of bytes occur in training.
    valid = as_bytes("\nthat cat ate that rat, the rat sat on the mat")
    counts = ByteCounts(as_bytes(TRAIN * 3), valid)
    best = counts.nll(valid, 3)
    found = counts.weights[3]
    for change in ([0.02, -0.02, 0], [0, 0.02, -0.02], [-0.02, 0, 0.02]):
        counts.weights[3] = found + torch.tensor(change, dtype=torch.float64)
        if counts.weights[3].min() > 0:
            assert counts.nll(valid, 3) > best - 1e-6


@pytest.mark.parametrize("context", ["th", "at", "\n\n", "zz"])
def test_probabilities_sum_to_one(context: str) -> None:
    counts = ByteCounts(as_bytes(TRAIN), as_bytes(VALID))
    ends = [[*as_bytes(context).tolist(), byte] for byte in range(256)]
    for order in (1, 2, 3):
        before = counts.nll(as_bytes(context), order)
        texts = (torch.tensor(text, dtype=torch.uint8) for text in ends)
        total = sum(math.exp(before - counts.nll(text, order)) for text in texts)
        assert total == pytest.approx(1)


def test_metrics_of_a_text() -> None:
    splits = {"train": as_bytes(TRAIN * 5), "valid": as_bytes(VALID), "test": as_bytes("the rat")}
    metrics = byte_metrics(EncodedBytes("text", "", "", splits))  # type: ignore[arg-type]
    assert tuple(metrics) == ORDERS
    losses = [metrics[name]["valid_loss"] for name in ORDERS]
    assert losses == sorted(losses, reverse=True)
    for row in metrics.values():
        for split in ("valid", "test"):
            loss = row[f"{split}_loss"]
            assert loss is not None
            assert row[f"{split}_perplexity"] == pytest.approx(math.exp(loss))
            assert row[f"{split}_bits_per_character"] == pytest.approx(loss / math.log(2))
