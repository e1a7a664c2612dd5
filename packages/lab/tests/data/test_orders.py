import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powernorm_lab.data.orders import LengthGroups, Order, Shuffled, ShuffledByLength, WithinBudget

PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40)


def groups(pairs: list[tuple[int, int]], batch_tokens: int) -> LengthGroups:
    sources, targets = torch.tensor(pairs).T
    return LengthGroups(sources, targets, batch_tokens=batch_tokens)


def positions(pairs: list[tuple[int, int]]) -> int:
    """Return the positions of the longer side of a batch, including padding."""
    sides = list(zip(*pairs, strict=True))
    return max(len(side) * max(side) for side in sides)


def cut_one_by_one(pairs: list[tuple[int, int]], budget: int) -> list[list[tuple[int, int]]]:
    """Add pairs to a batch while it is within the budget."""
    batches: list[list[tuple[int, int]]] = []
    for pair in sorted(pairs, key=lambda pair: (max(pair), pair)):
        if batches and positions([*batches[-1], pair]) <= budget:
            batches[-1].append(pair)
        else:
            batches.append([pair])
    return batches


@given(PAIRS, st.integers(1, 40))
def test_batches_are_as_large_as_the_budget_allows(
    pairs: list[tuple[int, int]], budget: int
) -> None:
    found = groups(pairs, budget)
    cut = [[pairs[number] for number in batch.tolist()] for batch in found.batches()]
    assert cut == cut_one_by_one(pairs, budget)
    assert len(found) == len(cut)
    # A pair that is longer alone is a batch by itself.
    assert all(positions(batch) <= budget or len(batch) == 1 for batch in cut)


@given(PAIRS, st.integers(0, 5))
def test_shuffling_exchanges_equally_long_pairs_only(
    pairs: list[tuple[int, int]], seed: int
) -> None:
    found = groups(pairs, 20)
    shuffled = torch.cat(found.batches(torch.Generator().manual_seed(seed))).tolist()
    assert sorted(shuffled) == list(range(len(pairs)))
    plain = torch.cat(found.batches()).tolist()
    assert [pairs[number] for number in shuffled] == [pairs[number] for number in plain]


def test_shuffling_is_even() -> None:
    found = groups([(3, 3)] * 6 + [(2, 2)], 99)
    generators = [torch.Generator().manual_seed(seed) for seed in range(300)]
    firsts = [int(torch.cat(found.batches(generator))[1]) for generator in generators]
    assert all(25 <= firsts.count(number) <= 80 for number in range(6))


LENGTHS = torch.tensor([3, 1, 2, 2, 3, 1, 2, 1, 3, 2])
GROUPS = LengthGroups(LENGTHS, LENGTHS, batch_tokens=6)


@pytest.mark.parametrize(
    ("order", "second", "of_next_epoch"),
    [
        (Shuffled(10, batch_size=3, seed=3, unit="rows"), [1, 2, 8], [1, 9, 5]),
        (ShuffledByLength(LENGTHS, batch_size=3, seed=3, unit="rows"), [4, 0, 8], [4, 8, 0]),
        (WithinBudget(GROUPS, seed=3), [5, 1, 7], [8, 0]),
        (WithinBudget(GROUPS, seed=3, row_seed=9), [2, 8], [8, 0]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Order) else "",
)
def test_orders_are_those_of_runs_that_are_stored(
    order: Order, second: list[int], of_next_epoch: list[int]
) -> None:
    """If they changed, interrupted runs would resume with other batches."""
    assert order.at(order.batches_per_epoch).tolist() == of_next_epoch
    assert order.at(1).tolist() == second
