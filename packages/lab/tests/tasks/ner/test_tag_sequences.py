import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from powernorm_lab.data.batch import IGNORED
from powernorm_lab.tasks.ner.model import FORBIDDEN, TagSequences

# Tags O, B and E of one kind: B must be followed by E.
STARTS, ENDS = (True, True, False), (True, False, True)
FOLLOWS = ((True, True, False), (False, False, True), (True, True, False))
LENGTHS = [4, 1, 3]


def build() -> TagSequences:
    tags = TagSequences(STARTS, FOLLOWS, ENDS).double()
    generator = torch.Generator().manual_seed(3)
    tags.draw_weights(generator)
    with torch.no_grad():
        for part in tags.parameters():
            noise = torch.randn(part.shape, generator=generator, dtype=part.dtype)
            part.add_(noise.masked_fill(part == FORBIDDEN, 0))
    return tags


def legal(length: int) -> Iterator[tuple[int, ...]]:
    for tags in itertools.product(range(3), repeat=length):
        pairs = itertools.pairwise(tags)
        if STARTS[tags[0]] and ENDS[tags[-1]] and all(FOLLOWS[a][b] for a, b in pairs):
            yield tags


def score(tags: TagSequences, scores: Tensor, sequence: tuple[int, ...]) -> Tensor:
    total = tags.start_transitions[sequence[0]] + tags.end_transitions[sequence[-1]]
    for before, after in itertools.pairwise(sequence):
        total = total + tags.transitions[before, after]
    return total + sum(scores[position, tag] for position, tag in enumerate(sequence))


def cases() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64) * 2
    targets = torch.tensor([[0, 1, 2, 0], [0, -100, -100, -100], [1, 2, 0, -100]])
    return scores, targets


def test_likelihood_is_that_of_all_legal_sequences() -> None:
    tags = build()
    scores, targets = cases()
    expected = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        every = torch.stack([score(tags, scores[row], sequence) for sequence in legal(length)])
        gold = score(tags, scores[row], tuple(targets[row, :length].tolist()))
        expected = expected + every.logsumexp(0) - gold
    torch.testing.assert_close(tags.nll(scores, targets), expected)


def test_likelihoods_of_all_sequences_sum_to_one() -> None:
    tags = build()
    scores, _ = cases()
    probabilities = [
        (-tags.nll(scores[:1], torch.tensor([sequence]))).exp() for sequence in legal(4)
    ]
    torch.testing.assert_close(sum(probabilities), torch.ones((), dtype=torch.float64))


def test_decoding_finds_the_best_sequence() -> None:
    tags = build()
    generator = torch.Generator().manual_seed(5)
    mask = torch.arange(4) >= torch.tensor(LENGTHS)[:, None]
    for _ in range(20):
        scores = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64) * 3
        expected = [
            list(max(legal(length), key=lambda s: score(tags, scores[row], s).item()))
            for row, length in enumerate(LENGTHS)
        ]
        assert tags.decode(scores, mask) == expected
    whole = tags.decode(scores)
    assert [len(row) for row in whole] == [4, 4, 4]
    assert set(map(tuple, whole)) <= set(legal(4))


def test_rows_of_padding_alone_count_for_nothing() -> None:
    tags = build()
    scores, targets = cases()
    padded = torch.cat([targets, torch.full((1, 4), IGNORED)])
    more = torch.cat([scores, torch.randn(1, 4, 3, dtype=torch.float64)])
    torch.testing.assert_close(tags.nll(more, padded), tags.nll(scores, targets))
    mask = padded == IGNORED
    assert tags.decode(more, mask)[:3] == tags.decode(scores, mask[:3])
    assert tags.decode(more, mask)[3] == []
    # A process without rows still has a gradient for every parameter.
    alone = scores[:1].requires_grad_()
    loss = tags.nll(alone, torch.full((1, 4), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert all(part.grad is not None and not part.grad.any() for part in tags.parameters())


def test_forbidden_transitions_stay_so() -> None:
    tags = TagSequences(STARTS, FOLLOWS, ENDS)
    optimizer = torch.optim.SGD(tags.parameters(), lr=0.5, momentum=0.9)
    scores, targets = cases()
    before = [part.clone() for part in tags.parameters()]
    for _ in range(5):
        optimizer.zero_grad()
        tags.nll(scores.float(), targets).backward()
        optimizer.step()
    for part, old in zip(tags.parameters(), before, strict=True):
        forbidden = old == FORBIDDEN
        assert torch.equal(part[forbidden], old[forbidden])
        assert not torch.equal(part, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_likelihood_of_half_precision_is_of_float32(dtype: torch.dtype) -> None:
    tags = TagSequences(STARTS, FOLLOWS, ENDS)
    scores, targets = cases()
    rounded = scores.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tags.nll(rounded, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, tags.nll(rounded.float(), targets))


def test_numbers_are_those_of_pytorch_crf() -> None:
    """Loss, gradient and decoding equal those of version 0.7.2."""
    tags = TagSequences([True] * 3, [[True] * 3] * 3, [True] * 3).double()
    with torch.no_grad():
        tags.start_transitions.copy_(torch.tensor([0.5, -0.25, 1.0]))
        tags.end_transitions.copy_(torch.tensor([-1.0, 0.75, 0.25]))
        rows = [[0.1, -0.2, 0.3], [0.4, 0.5, -0.6], [-0.7, 0.8, 0.9]]
        tags.transitions.copy_(torch.tensor(rows, dtype=torch.float64))
    scores = 2 * torch.arange(24, dtype=torch.float64).reshape(2, 4, 3).sin()
    targets = torch.tensor([[0, 2, 1, 1], [1, 0, IGNORED, IGNORED]])
    loss = tags.nll(scores, targets)
    loss.backward()
    assert loss.item() == pytest.approx(9.2251906285, abs=1e-6)
    gradient = [
        [0.0988564649, 0.1408683220, -0.6127920411],
        [-0.5913770920, -0.6655375928, 0.0988632770],
        [0.5255504443, 0.2994378032, 0.7061304146],
    ]
    wanted = torch.tensor(gradient, dtype=torch.float64)
    torch.testing.assert_close(tags.transitions.grad, wanted, rtol=0, atol=1e-6)
    assert tags.decode(scores, targets == IGNORED) == [[2, 0, 2, 1], [2, 1]]
