import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, Batch, TrainingBatches
from powernorm_lab.data.subwords import END_ID
from powernorm_lab.tasks.translation.batches import evaluation_pairs, training_pairs
from powernorm_lab.tasks.translation.data import EncodedPairSplit, TokenLists
from powernorm_lab.tasks.translation.search import padded_sources

Sizes = list[tuple[int, int]]
SIZES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=30)


def split(sizes: Sizes) -> EncodedPairSplit:
    """Return pairs whose words all equal the pair's number, so that rows are identifiable."""
    return EncodedPairSplit(
        *(
            TokenLists.from_lists([[number] * pair[side] for number, pair in enumerate(sizes, 1)])
            for side in (0, 1)
        )
    )


def training(sizes: Sizes, **changes: int) -> TrainingBatches:
    arguments = {"batch_tokens": 24, "seed": 0, "batches_per_update": 1}
    arguments |= changes
    return training_pairs(split(sizes), **arguments)


def numbers(batch: Batch) -> list[int]:
    """Return the numbers of the pairs in a batch."""
    return [number - 1 for number in batch.named["source"][:, 0].tolist() if number != END_ID]


def check(batch: Batch, sizes: Sizes) -> None:
    """Compare every position with the expected value for the row's pair."""
    found = numbers(batch)
    assert batch.num_targets == sum(sizes[number][1] + 1 for number in found)
    assert batch.num_tokens == sum(sum(sizes[number]) + 2 for number in found)
    masks = [batch.named.get(f"{side}_padding_mask") for side in ("source", "target")]
    source_mask, target_mask = (
        torch.zeros_like(ids, dtype=torch.bool) if mask is None else mask
        for mask, ids in zip(masks, (batch.named["source"], batch.named["target"]), strict=True)
    )
    assert all(mask is None or mask.any() for mask in masks)
    assert batch.named["target"].shape == batch.targets.shape == target_mask.shape
    assert batch.named["source"].shape == source_mask.shape
    assert (batch.targets[target_mask] == IGNORED).all()
    assert not batch.named["source"][source_mask].any()
    assert not batch.named["target"][target_mask].any()
    for row, number in enumerate(found):
        source, target = ([number + 1] * size for size in sizes[number])
        assert batch.named["source"][row][~source_mask[row]].tolist() == [*source, END_ID]
        assert batch.named["target"][row][~target_mask[row]].tolist() == [END_ID, *target]
        assert batch.targets[row][~target_mask[row]].tolist() == [*target, END_ID]


@settings(max_examples=60)
@given(SIZES, st.integers(8, 40), st.integers(1, 3), st.integers(0, 2))
def test_every_pair_is_once_in_an_epoch_over_all_ranks(
    sizes: Sizes, batch_tokens: int, num_ranks: int, epoch: int
) -> None:
    data = training(sizes, batch_tokens=batch_tokens)
    seen: list[int] = []
    first = epoch * data.batches_per_epoch
    for position in range(first, first + data.batches_per_epoch):
        parts = [data.batch(position).shard(rank, num_ranks) for rank in range(num_ranks)]
        for part in parts:
            check(part, sizes)
        found = [number for part in parts for number in numbers(part)]
        for side in (0, 1):
            lengths = [sizes[number][side] + 1 for number in found]
            assert len(lengths) * max(lengths) <= batch_tokens
        seen += found
    assert sorted(seen) == list(range(len(sizes)))


@settings(max_examples=40)
@given(SIZES, st.integers(1, 4), st.integers(1, 3))
def test_losses_over_loss_targets_are_the_mean_of_an_update(
    sizes: Sizes, batches_per_update: int, num_ranks: int
) -> None:
    data = training(sizes, batches_per_update=batches_per_update)
    for update in range(3):  # beyond the end of an epoch, where there are few batches
        places = range(update * batches_per_update, (update + 1) * batches_per_update)
        batches = [
            data.batch(at).shard(rank, num_ranks) for at in places for rank in range(num_ranks)
        ]
        shares = []
        for batch in batches:
            assert batch.loss_targets is not None
            shares.append(batch.num_targets / batch.loss_targets)
        # A loss of 1 at every target has the mean 1 after all averaging.
        assert sum(shares) / len(shares) == pytest.approx(1)


def test_a_rank_without_rows_gets_one_of_padding() -> None:
    batch = training([(3, 3)], batches_per_update=2).batch(0).shard(1, 2)
    assert batch.named["source"].shape == batch.named["target"].shape == (1, 1)
    assert batch.named["source_padding_mask"].all()
    assert batch.named["target_padding_mask"].all()
    assert batch.targets.tolist() == [[IGNORED]]
    assert (batch.num_tokens, batch.num_targets) == (0, 0)
    assert batch.loss_targets == 8 / 4


SOME: Sizes = [(1 + i % 5, 1 + i % 3) for i in range(60)]


def test_batches_are_the_same_in_each_epoch_but_for_their_order() -> None:
    data = training(SOME)
    size = data.batches_per_epoch
    epochs = [[data.batch(epoch * size + index) for index in range(size)] for epoch in (0, 1)]
    shapes = [sorted((*b.named["source"].shape, b.num_targets) for b in epoch) for epoch in epochs]
    assert shapes[0] == shapes[1]
    orders = [[b.num_targets for b in epoch] for epoch in epochs]
    assert orders[0] != orders[1]
    groups = [{frozenset(numbers(b)) for b in epoch} for epoch in epochs]
    assert groups[0] != groups[1]


def test_sizes_of_an_epoch() -> None:
    whole = training(SOME)
    total = sum(source + target + 2 for source, target in SOME)
    assert whole.tokens_per_batch == total / whole.batches_per_epoch


def test_a_pair_longer_than_the_budget_is_named() -> None:
    with pytest.raises(InputError, match=r"data.batch_tokens=8 is less than the 10 subwords"):
        training([(1, 1), (2, 9)], batch_tokens=8)
    assert training([(1, 1), (2, 9)], batch_tokens=10).batches_per_epoch == 2


@settings(max_examples=60)
@given(SIZES, st.integers(1, 30), st.integers(1, 3))
def test_evaluation_has_every_pair_once(sizes: Sizes, batch_tokens: int, num_ranks: int) -> None:
    data = evaluation_pairs(split(sizes), batch_tokens=batch_tokens)
    batches = list(data)
    assert len(batches) == len(data)
    longest = [
        max(batch.named["source"].shape[1], batch.named["target"].shape[1]) for batch in batches
    ]
    assert longest == sorted(longest)
    seen: list[int] = []
    for batch in batches:
        assert batch.loss_targets is None
        size = max(batch.named["source"].numel(), batch.named["target"].numel())
        assert size <= batch_tokens or len(batch.named["source"]) == 1
        parts = [batch.shard(rank, num_ranks) for rank in range(num_ranks)]
        for part in parts:
            check(part, sizes)
        assert sum(part.num_targets for part in parts) == batch.num_targets
        seen += [number for part in parts for number in numbers(part)]
    assert sorted(seen) == list(range(len(sizes)))


def test_evaluation_of_a_part_is_evenly_spaced() -> None:
    sizes: Sizes = [(2, 1 + i % 2) for i in range(100)]  # 2.5 targets a pair
    data = evaluation_pairs(split(sizes), batch_tokens=30, max_tokens=50)
    assert sorted(n for batch in data for n in numbers(batch)) == list(range(0, 100, 5))
    for max_tokens, num_pairs in ((1, 1), (999, 100), (None, 100)):
        data = evaluation_pairs(split(sizes), batch_tokens=30, max_tokens=max_tokens)
        assert sum(len(batch.named["source"]) for batch in data) == num_pairs


def test_inputs_leave_out_masks_without_padding() -> None:
    even, odd = training([(2, 2), (2, 2)]).batch(0), training([(2, 2), (1, 2)]).batch(0)
    assert set(even.inputs()) == {"source", "target"}
    assert set(odd.inputs()) == {"source", "target", "source_padding_mask"}
    moved = odd.to(torch.device("meta"))
    assert {part.device.type for part in moved.inputs().values()} == {"meta"}
    assert moved.targets.device.type == "meta"
    assert moved.loss_targets == odd.loss_targets


@settings(max_examples=30)
@given(SIZES)
def test_joined_batches_hold_all_rows(sizes: Sizes) -> None:
    data = training(sizes, batches_per_update=2)
    parts = [data.batch(position) for position in range(data.batches_per_epoch)]
    whole = parts[0].joined_with(parts[1:])
    check(whole, sizes)
    assert sorted(numbers(whole)) == list(range(len(sizes)))
    assert whole.loss_targets == sum(part.loss_targets or 0 for part in parts)
    lone, *others = evaluation_pairs(split(sizes), batch_tokens=9)
    assert lone.joined_with(others).loss_targets is None


def test_sources_alone() -> None:
    ids, mask = padded_sources([[5], [6, 7]])
    assert ids.tolist() == [[5, END_ID, 0], [6, 7, END_ID]]
    assert mask is not None
    assert mask.tolist() == [[False, False, True], [False] * 3]
    assert padded_sources([[5]])[1] is None
