import itertools
import math
from collections import Counter

import pytest
import torch

from powernorm_lab.data.baselines import UnigramModel
from powernorm_lab.data.corpus import Corpus
from powernorm_lab.data.subwords import END_ID, EncodedCorpus, EncodedSplit
from powernorm_lab.tasks.lm.task import BigramModel, baseline_metrics
from powernorm_lab.tasks.ner.task import WordTagModel

SIZE = 6
GENERATOR = torch.Generator().manual_seed(0)
# 5 occurs in valid and test only; 4 ends train, so it is never a context there.
TRAIN = torch.cat([torch.randint(4, (60,), generator=GENERATOR), torch.tensor([4])])
VALID = torch.randint(SIZE, (40,), generator=GENERATOR)
TEST = torch.tensor([5, 5, 0, 1, 4, 2])


def brute_unigram(token: int) -> float:
    return (TRAIN.tolist().count(token) + 1) / (len(TRAIN) + SIZE)


def brute_bigram(before: int, token: int, weight: float) -> float:
    stream = [END_ID, *TRAIN.tolist()]
    pairs = Counter(itertools.pairwise(stream))
    context = Counter(stream[:-1])[before]
    if not context:
        return brute_unigram(token)
    return weight * pairs[before, token] / context + (1 - weight) * brute_unigram(token)


def brute_nll(tokens: torch.Tensor, weight: float) -> float:
    stream = [END_ID, *tokens.tolist()]
    pairs = itertools.pairwise(stream)
    return -sum(math.log(brute_bigram(before, token, weight)) for before, token in pairs)


def test_unigram_against_counting() -> None:
    model = UnigramModel(TRAIN, SIZE)
    expected = [brute_unigram(int(token)) for token in TEST]
    assert model.probabilities(TEST).tolist() == pytest.approx(expected, rel=1e-12)
    assert model.probabilities(torch.arange(SIZE)).sum() == pytest.approx(1)


def test_bigram_against_counting() -> None:
    model = BigramModel(TRAIN, VALID, SIZE)
    stream = [END_ID, *TEST.tolist()]
    pairs = itertools.pairwise(stream)
    expected = [brute_bigram(before, token, model.weight) for before, token in pairs]
    assert model.probabilities(TEST).tolist() == pytest.approx(expected, rel=1e-12)


def test_weight_makes_valid_most_likely() -> None:
    weight = BigramModel(TRAIN, VALID, SIZE).weight
    assert 0 < weight < 1
    best = min((brute_nll(VALID, w / 1000), w / 1000) for w in range(1000))[1]
    assert weight == pytest.approx(best, abs=2e-3)


def test_bigram_of_every_context_sums_to_one() -> None:
    model = BigramModel(TRAIN, VALID, SIZE)
    for before in range(SIZE):
        total = sum(
            float(model.probabilities(torch.tensor([before, token]))[1]) for token in range(SIZE)
        )
        assert total == pytest.approx(1)


def test_metrics_are_per_word_and_per_token() -> None:
    corpus = Corpus("t", "t", "t", {"train": (), "valid": (), "test": ()}, False)
    splits = {
        "train": EncodedSplit(TRAIN, 30),
        "valid": EncodedSplit(VALID, 20),
        "test": EncodedSplit(TEST, 3),
    }
    metrics = baseline_metrics(UnigramModel(TRAIN, SIZE), EncodedCorpus(corpus, SIZE, splits, ""))
    nll = -sum(math.log(brute_unigram(int(token))) for token in TEST)
    assert metrics["test_loss"] == pytest.approx(nll / 6)
    assert metrics["test_perplexity"] == pytest.approx(math.exp(nll / 3))
    assert set(metrics) == {"valid_perplexity", "valid_loss", "test_perplexity", "test_loss"}


def test_tags_of_words_against_counting() -> None:
    pairs = [(0, 1), (0, 1), (0, 2), (1, 0), (3, 2)]  # word 2 was never seen
    words, tags = torch.tensor(pairs).T
    counts, of_word, of_tag = (Counter(values) for values in (pairs, words.tolist(), tags.tolist()))
    found = WordTagModel(words, tags, 4, 3).probabilities(torch.arange(4)[:, None], torch.arange(3))
    for word in range(4):
        for tag in range(3):
            prior = (of_tag[tag] + 1) / (len(pairs) + 3)
            expected = (counts[word, tag] + prior) / (of_word[word] + 1)
            assert float(found[word, tag]) == pytest.approx(expected)
    torch.testing.assert_close(found.sum(1), torch.ones(4, dtype=torch.float64))
