from itertools import pairwise

import pytest
import torch
from torch import Tensor

from powernorm_lab.data.batch import IGNORED, Batch, TrainingBatches
from powernorm_lab.tasks.lm_char.data import FIRST, Streams, TextStreams

TEXT = torch.randint(256, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def training(
    batch_size: int = 4, seed: int = 0, text: Tensor = TEXT, place: int = 0, **options: int
) -> TrainingBatches:
    streams = TextStreams(text, length=7, place=place)
    return streams.training(batch_size=batch_size, seed=seed, **options)


def test_rows_go_on_where_they_ended() -> None:
    streams = training()
    per_epoch = streams.batches_per_epoch
    assert per_epoch == 1000 // (4 * 7) == 35
    for position in range(per_epoch - 1):
        one, following = streams.batch(position), streams.batch(position + 1)
        assert torch.equal(following.named["starts"], one.named["starts"] + 7)
        assert torch.equal(following.named["tokens"][:, 0], one.targets[:, -1])
        assert torch.equal(one.named["tokens"][:, 1:], one.targets[:, :-1])


def test_targets_stand_where_the_batch_says() -> None:
    streams = training(place=5000)
    for position in (0, 1, 34, 35, 100):
        batch = streams.batch(position)
        for row, start in enumerate((batch.named["starts"] - 5000).tolist()):
            assert torch.equal(batch.targets[row], TEXT[start : start + 7].long())
            before = TEXT[start - 1].item() if start else FIRST
            assert batch.named["tokens"][row, 0] == before


def test_epochs_are_cut_elsewhere_and_show_no_byte_twice() -> None:
    streams = training()
    firsts = set()
    for epoch in range(8):
        seen = torch.zeros(1000, dtype=torch.long)
        for position in range(35 * epoch, 35 * (epoch + 1)):
            starts = streams.batch(position).named["starts"]
            places = starts[:, None] + torch.arange(7)
            seen.view(-1).index_add_(0, places.flatten(), torch.ones_like(places.flatten()))
        assert int(seen.sum()) == 35 * 28
        assert seen.max() == 1
        firsts.add(int(seen.argmax()))
    assert len(firsts) > 2
    assert min(firsts) >= 0
    assert max(firsts) <= 1000 - 35 * 28


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_an_update_has_the_same_bytes_however_it_is_divided(parts: int) -> None:
    whole = training(batch_size=8)
    divided = training(batch_size=8 // parts, batches_per_update=parts)
    assert divided.batches_per_epoch == parts * whole.batches_per_epoch
    for update in range(2 * whole.batches_per_epoch + 3):
        cut = [divided.batch(parts * update + part).named["tokens"] for part in range(parts)]
        assert torch.equal(torch.cat(cut), whole.batch(update).named["tokens"])


@pytest.mark.parametrize("num_bytes", range(28, 60, 3))
def test_every_offset_stays_inside_the_text(num_bytes: int) -> None:
    text = torch.arange(num_bytes, dtype=torch.uint8)
    for position in range(12):
        batch = training(text=text).batch(position)
        assert int(batch.named["starts"].max()) + 7 <= num_bytes


@pytest.mark.parametrize("num_bytes", [1, 3, 7, 8, 27, 28, 29, 31, 999, 1000])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_evaluation_asks_for_every_byte_once(num_bytes: int, batch_size: int) -> None:
    streams = TextStreams(TEXT[:num_bytes], length=7).evaluation(batch_size=batch_size)
    batches = list(streams)
    assert len(batches) == len(streams)
    asked = torch.zeros(num_bytes, dtype=torch.long)
    for batch in batches:
        assert "padding_mask" not in batch.named
        places = batch.named["starts"][:, None] + torch.arange(batch.targets.shape[1])
        counted = batch.targets != IGNORED
        asked.index_add_(0, places[counted], torch.ones_like(places[counted]))
        assert torch.equal(batch.targets[counted], TEXT[places[counted]].long())
    assert asked.eq(1).all()
    assert num_bytes == sum(batch.num_targets for batch in batches)
    assert batches[0].named["tokens"][0, 0] == FIRST


def test_evaluation_goes_on_too() -> None:
    batches = list(TextStreams(TEXT, length=7, place=10_000).evaluation(batch_size=3))
    starts = [batch.named["starts"] for batch in batches]
    assert starts[0].tolist() == [10_000, 10_333, 10_666]
    for number, (one, following) in enumerate(pairwise(starts[:-1])):
        assert torch.equal(following, one + 7), number
    # 333 is no multiple of 7; one byte of 1,000 remains.
    assert [batch.targets.shape for batch in batches[-2:]] == [(3, 4), (1, 7)]
    assert batches[-1].num_targets == 1


@pytest.mark.parametrize("num_bytes", [1, 6, 7, 50, 1000])
@pytest.mark.parametrize("max_tokens", [1, 7, 60, 5000])
def test_part_of_an_evaluation(num_bytes: int, max_tokens: int) -> None:
    streams = TextStreams(TEXT[:num_bytes], length=7).evaluation(
        batch_size=4, max_tokens=max_tokens
    )
    batches = list(streams)
    assert len(batches) == len(streams) > 0
    num_asked = sum(batch.num_targets for batch in batches)
    assert 0 < num_asked <= max(max_tokens, 4 * 7)
    if max_tokens >= num_bytes:
        assert num_asked == num_bytes
    starts = batches[0].named["starts"]
    assert starts[0] == 0, "of every stream its beginning, so that they go on"


def batch() -> Batch:
    found: Batch = training().batch(3)
    return found


def test_inputs_and_devices() -> None:
    whole = batch()
    assert set(whole.inputs()) == {"tokens", "starts"}
    moved = whole.to(torch.device("meta"))
    assert moved.named["tokens"].device.type == moved.targets.device.type == "meta"
    assert moved.named["starts"].device.type == "cpu", "its values are looked at in every step"
    masked = whole.shard(4, 5).to(torch.device("meta"))
    assert masked.named["padding_mask"].device.type == "meta"


def test_joined_rows_ask_for_no_memory() -> None:
    batches = list(TextStreams(TEXT, length=7).evaluation(batch_size=3))
    joined = batches[0].joined_with(batches[1:])
    assert joined.named.keys() == {"tokens", "padding_mask"}
    assert joined.num_targets == 1000
    assert joined.num_tokens == sum(batch.num_tokens for batch in batches)
    even = batches[0].joined_with(batches[1:3])
    assert even.named.keys() == {"tokens"}
    assert torch.equal(even.named["tokens"][3:6], batches[1].named["tokens"])


def test_streams_are_those_of_runs_that_are_stored() -> None:
    """If they changed, interrupted runs would resume with other batches."""
    order = Streams(100, length=7, batch_size=3, seed=3, batches_per_update=2)
    assert order.at(order.batches_per_epoch).tolist() == [8, 22, 36]
    assert order.at(1).tolist() == [58, 72, 86]
