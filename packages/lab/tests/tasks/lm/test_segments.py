import pytest
import torch

from powernorm_lab.data.batch import TrainingBatches
from powernorm_lab.data.subwords import END_ID
from powernorm_lab.tasks.lm.data import Segments, TextSegments

TOKENS = torch.arange(1, 1001, dtype=torch.int32)
"""Token i is at position i of the stream, so that batches show their positions."""


def training(seed: int = 0, **changes: int) -> TrainingBatches:
    sizes = {"batch_size": 4} | changes
    return TextSegments(TOKENS, length=7).training(seed=seed, **sizes)


def test_targets_are_the_next_tokens_of_contiguous_segments() -> None:
    batch = training().batch(3)
    assert batch.named["tokens"].shape == batch.targets.shape == (4, 7)
    assert torch.equal(batch.targets, batch.named["tokens"] + 1)
    assert torch.equal(batch.named["tokens"][:, 1:], batch.named["tokens"][:, :-1] + 1)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_an_update_holds_the_same_segments_however_it_is_divided(parts: int) -> None:
    """This holds over several epochs: 1,000 tokens give 142 segments, not a multiple of 8."""
    whole = training(batch_size=8)
    divided = training(batch_size=8 // parts, batches_per_update=parts)
    assert divided.batches_per_epoch == parts * whole.batches_per_epoch
    for update in range(3 * whole.batches_per_epoch):
        cut = [divided.batch(parts * update + part).named["tokens"] for part in range(parts)]
        assert torch.equal(torch.cat(cut), whole.batch(update).named["tokens"])


def test_updates_may_be_longer_than_the_text() -> None:
    long = training(batch_size=64, batches_per_update=16)
    assert long.batches_per_epoch == training(batch_size=64).batches_per_epoch == 2
    assert torch.equal(
        long.batch(5).named["tokens"], training(batch_size=64).batch(5).named["tokens"]
    )


def test_an_epoch_shows_no_token_twice_and_misses_few() -> None:
    segments = training()
    n = segments.batches_per_epoch
    for epoch in (0, 1):
        batches = [segments.batch(epoch * n + i).targets for i in range(n)]
        seen = torch.cat(batches).flatten()
        assert seen.unique().numel() == seen.numel()
        assert TOKENS.numel() - seen.numel() < 2 * 7 + 4 * 7
    first = {row[0].item() for i in range(n) for row in segments.batch(i).targets}
    second = {row[0].item() for i in range(n) for row in segments.batch(n + i).targets}
    assert first != second, "each epoch is cut at its own offset"


@pytest.mark.parametrize("num_tokens", range(34, 49))
def test_every_offset_stays_inside_the_stream(num_tokens: int) -> None:
    segments = TextSegments(TOKENS[:num_tokens], length=7).training(batch_size=4, seed=0)
    for position in range(40):
        assert segments.batch(position).targets.max() <= num_tokens


@pytest.mark.parametrize("num_tokens", [3, 7, 8, 27, 28, 29, 1000])
def test_evaluation_predicts_every_token_once_in_order(num_tokens: int) -> None:
    segments = TextSegments(TOKENS[:num_tokens], length=7).evaluation(batch_size=4)
    batches = list(segments)
    assert len(batches) == len(segments)
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    assert torch.equal(targets, TOKENS[:num_tokens].long())
    assert batches[0].named["tokens"][0, 0] == END_ID


def test_part_of_an_evaluation_is_spread_over_the_text() -> None:
    segments = TextSegments(TOKENS, length=7).evaluation(batch_size=4, max_tokens=70)
    targets = torch.cat([batch.targets for batch in segments])
    assert targets.numel() == 70
    assert targets.unique().numel() == 70
    starts = targets[:, 0]
    assert starts[0] == 1
    assert starts.diff().min() >= 13 * 7
    assert starts[-1] > 850


@pytest.mark.parametrize("num_tokens", [1, 6, 7, 8, 50])
@pytest.mark.parametrize("max_tokens", [1, 7, 20, 1000])
def test_part_of_an_evaluation_is_never_empty(num_tokens: int, max_tokens: int) -> None:
    segments = TextSegments(TOKENS[:num_tokens], length=7).evaluation(
        batch_size=4, max_tokens=max_tokens
    )
    batches = list(segments)
    assert len(batches) == len(segments) > 0
    assert all(batch.targets.numel() for batch in batches)


def test_segments_are_those_of_runs_that_are_stored() -> None:
    """If they changed, interrupted runs would resume with other batches."""
    order = Segments(100, length=7, batch_size=3, seed=3)
    assert order.at(order.batches_per_epoch).tolist() == [90, 62, 48]
    assert order.at(1).tolist() == [41, 13, 6]
