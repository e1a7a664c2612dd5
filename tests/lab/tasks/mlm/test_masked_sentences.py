from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from powernorm.errors import InputError
from powernorm.lab.data.batch import IGNORED, Batch
from powernorm.lab.data.subwords import END_ID
from powernorm.lab.tasks.mlm.batches import MaskedSentences

MASK = 1_000_000


def stream(lengths: list[int]) -> Tensor:
    """Documents of these lengths, every token another id, each with its end mark."""
    tokens, following = [], 1
    for length in lengths:
        tokens += [*range(following, following + length), END_ID]
        following += length
    return torch.tensor(tokens, dtype=torch.int32)


def restored(batch: Batch) -> list[list[int]]:
    """The rows without padding and with their masked tokens back."""
    whole = torch.where(batch.targets == IGNORED, batch.named["tokens"], batch.targets)
    return [
        row[~padding].tolist()
        for row, padding in zip(whole, batch.named["padding_mask"], strict=True)
    ]


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_evaluation_shows_every_token_once_in_order(
    lengths: list[int], length: int, batch_size: int
) -> None:
    data = MaskedSentences(stream(lengths), mask_id=MASK, length=length).evaluation(
        batch_size=batch_size
    )
    batches = list(data)
    assert len(batches) == len(data)
    rows = [row for batch in batches for row in restored(batch)]
    assert [token for row in rows for token in row] == list(range(1, sum(lengths) + 1))
    assert all(1 <= len(row) <= length for row in rows)
    # Cut at documents: a row holds one document's consecutive tokens only.
    starts = [sum(lengths[:i]) + 1 for i, n in enumerate(lengths) if n]
    assert all(not set(starts) & set(row[1:]) for row in rows)


def test_masked_positions_are_asked_for_and_no_others() -> None:
    data = MaskedSentences(stream([7, 1, 12, 4] * 50), mask_id=MASK, length=8).training(
        batch_size=64, seed=3
    )
    asked, tokens = 0, 0
    for position in range(data.batches_per_epoch):
        batch = data.batch(position)
        is_masked = batch.named["tokens"] == MASK
        assert torch.equal(is_masked, batch.targets != IGNORED)
        assert not bool((is_masked & batch.named["padding_mask"]).any())
        assert bool(is_masked.any(dim=1).all())
        assert batch.num_targets == int(is_masked.sum())
        assert batch.num_tokens == int((~batch.named["padding_mask"]).sum())
        asked, tokens = asked + batch.num_targets, tokens + batch.num_tokens
    # 15 %, and one in rows that would have none.
    assert 0.15 < asked / tokens < 0.3


def test_long_rows_are_masked_to_fifteen_percent() -> None:
    data = MaskedSentences(stream([100] * 100), mask_id=MASK, length=100).evaluation(batch_size=100)
    (batch,) = data
    assert batch.num_targets / batch.num_tokens == pytest.approx(0.15, abs=0.01)


def test_training_order_and_masks_depend_on_seed_and_position_alone() -> None:
    def batch(seed: int, position: int) -> Batch:
        tokens = stream([5, 3, 8, 2, 6, 9, 4, 7])
        data = MaskedSentences(tokens, mask_id=MASK, length=6).training(batch_size=3, seed=seed)
        return data.batch(position)

    first = batch(0, 5)
    assert torch.equal(first.named["tokens"], batch(0, 5).named["tokens"])
    assert torch.equal(first.targets, batch(0, 5).targets)
    assert restored(first) != restored(batch(1, 5))
    # The same rows come again in another epoch, under other masks.
    data = MaskedSentences(stream([40]), mask_id=MASK, length=40).training(batch_size=1, seed=0)
    assert restored(data.batch(0)) == restored(data.batch(1))
    assert not torch.equal(data.batch(0).named["tokens"], data.batch(1).named["tokens"])


def test_an_epoch_has_each_row_at_most_once_and_an_even_batch_size_all() -> None:
    data = MaskedSentences(stream([3] * 8), mask_id=MASK, length=4).training(batch_size=4, seed=1)
    for epoch in range(3):
        rows = [tuple(row) for i in range(2) for row in restored(data.batch(2 * epoch + i))]
        assert max(Counter(rows).values()) == 1
        assert len(rows) == 8
    assert data.tokens_per_batch == 12


def test_a_part_of_the_evaluation_is_evenly_spaced() -> None:
    tokens = stream([4] * 100)
    data = MaskedSentences(tokens, mask_id=MASK, length=4).evaluation(batch_size=8, max_tokens=40)
    rows = [row for batch in data for row in restored(batch)]
    assert [row[0] for row in rows] == [1 + 40 * i for i in range(10)]


def test_fewer_rows_than_a_batch_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"2 documents, fewer than a batch of 3: lower data\.batch"
    ):
        MaskedSentences(stream([3, 3]), mask_id=MASK, length=4).training(batch_size=3, seed=0)
