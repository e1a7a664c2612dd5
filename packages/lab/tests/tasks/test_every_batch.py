"""Batches of all tasks: a table of rows, and the properties that each of them has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, NOWHERE, Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.classify.data import EncodedTextSplit, TextRows
from powernorm_lab.tasks.image.data import EncodedImages, ImageRows, Images, ImageSet, encode_images
from powernorm_lab.tasks.lm.data import TextSegments
from powernorm_lab.tasks.lm_char.data import TextStreams
from powernorm_lab.tasks.ner.data import NUM_MARKS, TaggedRows, encode_entities
from powernorm_lab.tasks.ner.sources import EntityCorpus, TaggedSentence
from powernorm_lab.tasks.ner.tag_schemes import Span
from powernorm_lab.tasks.parse.data import STATES, TransitionRows
from powernorm_lab.tasks.parse.parsing import GoldTransitions
from powernorm_lab.tasks.sequences.data import SeriesRows, SeriesSplit
from powernorm_lab.tasks.translation.batches import evaluation_pairs, training_pairs
from powernorm_lab.tasks.translation.data import EncodedPairSplit, TokenLists

NUMBER, SIZE = 43, 4
"""Number of rows, and rows in a batch."""
LENGTHS = [1 + (7 * row) % 9 for row in range(NUMBER)]
LABELS = torch.arange(NUMBER)


class Made(NamedTuple):
    """The batches of a task, in which every row can be told."""

    training: Callable[..., TrainingBatches]
    """Function of `batch_size` and `seed`."""
    evaluation: Callable[..., EvaluationBatches]
    """Function of `batch_size` and `max_tokens`."""
    ids: Callable[[Batch], Tensor]
    """Function that returns the numbers of a batch's rows."""
    units: str
    """Words for too few rows."""
    lengths: Sequence[int] = LENGTHS


def told(*columns: Tensor) -> Tensor:
    """Return the numbers of rows, after a check that all columns have the same ones."""
    assert all(torch.equal(column, columns[0]) for column in columns)
    return columns[0]


def images() -> EncodedImages:
    pixels = LABELS.to(torch.uint8)[:, None, None, None].expand(-1, 3, 6, 6).clone()
    pixels[:, :, 2:4, 3] = 200
    splits = dict.fromkeys(SPLITS, Images(pixels, LABELS))
    return encode_images(ImageSet("x", "here", "", splits, (), True))  # type: ignore[arg-type]


def of_images(batch: Batch) -> Tensor:
    corner = batch.inputs()["pixels"][:, 0, 0, 0] * IMAGES.std[0] + IMAGES.mean[0]
    return told(batch.targets, (255 * corner).round().long())


def sentences() -> TaggedRows:
    made = [
        TaggedSentence((f"w{row:02}",) * (length + 1), (Span("P", 0, 1),))
        for row, length in enumerate(LENGTHS)
    ]
    corpus = EntityCorpus("toy", "toy", "none", dict.fromkeys(SPLITS, made))  # type: ignore[arg-type]
    encoded = encode_entities(corpus, vocabulary_size=100, max_length=20)
    numbers = torch.tensor([int(word[1:]) for word in encoded.words])
    rows = TaggedRows(encoded.splits["train"], has_characters=True)
    rows.numbers = numbers  # type: ignore[attr-defined]
    return rows


def pairs(**sizes: Any) -> TrainingBatches:
    size = sizes.pop("batch_size")
    return training_pairs(PAIRS, batch_tokens=size * 5, batches_per_update=1, **sizes)


PAIRS = EncodedPairSplit(
    *(
        TokenLists.from_lists([[row + 1] * length for row, length in enumerate(lengths)])
        for lengths in (LENGTHS, LENGTHS[::-1])
    )
)
TEXTS = EncodedTextSplit(
    LABELS.repeat_interleave(torch.tensor(LENGTHS)).int(), torch.tensor(LENGTHS), LABELS
)
SERIES = SeriesSplit(
    torch.randn(sum(LENGTHS), 2, generator=torch.Generator().manual_seed(0)),
    torch.tensor(LENGTHS),
    LABELS,
)
ENTITIES, IMAGES = sentences(), images()


def by_rows(rows: Any, ids: Callable[[Batch], Tensor], units: str, **more: Any) -> Made:
    return Made(rows.training, rows.evaluation, ids, units, **more)


def classes(batch: Batch) -> Tensor:
    return batch.targets


def of_texts(batch: Batch) -> Tensor:
    tokens, padding = batch.named["tokens"], batch.named["padding_mask"]
    assert torch.equal(tokens, batch.targets[:, None].masked_fill(padding, 0))
    return batch.targets


ONES = [1] * NUMBER
MADE = {
    "images": by_rows(ImageRows(IMAGES, "train"), of_images, "images", lengths=ONES),
    "augmented": by_rows(
        ImageRows(IMAGES, "train", augmentation=True), classes, "images", lengths=ONES
    ),
    "transitions": by_rows(
        TransitionRows(GoldTransitions(LABELS[:, None].expand(-1, 48).short(), LABELS, {})),
        lambda batch: told(batch.targets, *batch.named[STATES].unbind(1)),
        "transitions",
        lengths=ONES,
    ),
    "sentences": by_rows(
        ENTITIES,
        lambda batch: ENTITIES.numbers[batch.named["tokens"][:, 0] - NUM_MARKS],  # type: ignore[attr-defined]
        "sentences",
        lengths=[length + 1 for length in LENGTHS],
    ),
    "texts": by_rows(TextRows(TEXTS), of_texts, "texts"),
    "texts by tokens": by_rows(TextRows(TEXTS, batch_tokens=20), of_texts, ""),
    "series": by_rows(SeriesRows(SERIES), classes, "series"),
    "series by length": by_rows(SeriesRows(SERIES, by_length=True), classes, "series"),
    "pairs": Made(
        pairs,
        lambda batch_size, max_tokens=None: evaluation_pairs(
            PAIRS, batch_tokens=5 * batch_size, max_tokens=max_tokens
        ),
        lambda batch: batch.named["source"][:, 0] - 1,
        "",
        [length + 1 for length in LENGTHS],
    ),
    "segments": by_rows(
        TextSegments(torch.arange(1, 310, dtype=torch.int32), length=7),
        lambda batch: batch.targets[:, 0],
        "segments",
        lengths=[7] * NUMBER,
    ),
    "streams": by_rows(
        TextStreams(torch.arange(310).to(torch.uint8), length=7),
        lambda batch: batch.named["starts"],
        "segments",
        lengths=[7] * NUMBER,
    ),
}
WITHIN_BUDGET = ("texts by tokens", "pairs")
DIVIDED = ("segments", "streams")
"""Texts, of which every epoch is cut elsewhere."""


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.named.keys() == other.named.keys()
    assert all(torch.equal(value, other.named[name]) for name, value in one.named.items())
    assert torch.equal(one.targets, other.targets)
    assert one[2:] == other[2:]


@pytest.mark.parametrize("name", MADE)
def test_batches_are_functions_of_seed_and_position(name: str) -> None:
    """They leave the global random state alone, and do not depend on it."""
    made = MADE[name]
    first, again, other = (made.training(batch_size=SIZE, seed=seed) for seed in (3, 3, 4))
    count = 2 * first.batches_per_epoch + 1
    torch.manual_seed(1)
    before = torch.get_rng_state()
    passed = [first.batch(position) for position in range(count)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    for position in reversed(range(count)):
        assert_equal(again.batch(position), passed[position])
    changed = [made.ids(other.batch(position)).tolist() for position in range(count)]
    assert changed != [made.ids(batch).tolist() for batch in passed]


@pytest.mark.parametrize("name", MADE)
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(name: str) -> None:
    made = MADE[name]
    training = made.training(batch_size=SIZE, seed=0)
    size, orders = training.batches_per_epoch, []
    for epoch in range(2):
        batches = [training.batch(epoch * size + index) for index in range(size)]
        orders.append([row for batch in batches for row in made.ids(batch).tolist()])
        assert len(set(orders[-1])) == len(orders[-1])
        # Rows that fill no batch are left out.
        whole = NUMBER if name in WITHIN_BUDGET else size * SIZE
        assert len(orders[-1]) == whole > NUMBER - SIZE - (name in DIVIDED)
        if name not in DIVIDED:
            assert set(orders[-1]) <= set(range(NUMBER))
        if name not in (*DIVIDED, "pairs"):
            for batch in batches:
                rows = made.ids(batch).tolist()
                assert batch.num_tokens == sum(made.lengths[row] for row in rows)
                assert batch.num_targets == (batch.num_tokens if name == "sentences" else len(rows))
    assert orders[0] != orders[1]
    if name != "pairs":
        mean = sum(made.lengths) / NUMBER
        wanted = sum(made.lengths) / size if name == "texts by tokens" else mean * SIZE
        assert training.tokens_per_batch == pytest.approx(wanted)


@pytest.mark.parametrize("name", [name for name, made in MADE.items() if made.units])
def test_too_few_rows_are_named(name: str) -> None:
    made = MADE[name]
    message = rf"[0-9]+ {made.units if name not in DIVIDED else '(bytes|tokens)'}, fewer than "
    with pytest.raises(InputError, match=message):
        made.training(batch_size=200, seed=0)


@pytest.mark.parametrize("name", [name for name in MADE if name != "streams"])
def test_an_evaluation_has_every_row_once_and_a_part_is_evenly_spaced(name: str) -> None:
    made = MADE[name]
    whole = made.evaluation(batch_size=SIZE)
    batches = list(whole)
    assert len(batches) == len(whole)
    rows = [row for batch in batches for row in made.ids(batch).tolist()]
    numbers = list(range(1, 310, 7)) if name == "segments" else list(range(NUMBER))
    assert (sorted(rows) if name in (*WITHIN_BUDGET, "texts") else rows) == numbers
    for batch, again in zip(batches, whole, strict=True):
        assert_equal(batch, again)
    assert len(list(made.evaluation(batch_size=SIZE, max_tokens=1))) == 1
    half = made.evaluation(batch_size=SIZE, max_tokens=sum(made.lengths) // 2)
    some = sorted(row for batch in half for row in made.ids(batch).tolist())
    assert set(some) <= set(numbers)
    assert NUMBER // 2 - 3 <= len(some) <= NUMBER // 2 + 3
    assert some[0] == numbers[0]
    assert max(b - a for a, b in pairwise(some)) <= 3 * (numbers[1] - numbers[0])


@pytest.mark.parametrize("name", ["sentences", "texts by tokens", "series by length", "pairs"])
def test_rows_of_about_one_length_are_together(name: str) -> None:
    made = MADE[name]
    training = made.training(batch_size=SIZE, seed=0)
    batches = [training.batch(position) for position in range(training.batches_per_epoch)]
    names = ("padding_mask", "source_padding_mask")
    masks = [batch.named[one] for batch in batches for one in names if one in batch.named]
    assert sum(int(mask.sum()) for mask in masks) < 0.25 * sum(one.num_tokens for one in batches)
    if name in WITHIN_BUDGET:
        assert all(next(iter(batch.named.values())).numel() <= 20 for batch in batches)
    widths = [next(iter(batch.named.values())).shape[1] for batch in batches]
    assert widths != sorted(widths)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("size", [2, 3, SIZE + 1])
def test_processes_divide_the_rows_of_a_batch(name: str, size: int) -> None:
    """A process without rows has one of padding, and is asked nothing."""
    made = MADE[name]
    whole = made.training(batch_size=SIZE, seed=0).batch(1)
    parts = [whole.shard(rank, size) for rank in range(size)]
    assert sum(part.num_tokens for part in parts) == whole.num_tokens
    assert sum(part.num_targets for part in parts) == whole.num_targets
    mean = whole.num_targets if whole.loss_targets is None else whole.loss_targets
    assert all(part.loss_targets == pytest.approx(mean / size) for part in parts)
    if whole.logged_targets is not None:
        assert all(part.logged_targets == whole.logged_targets / size for part in parts)
    rows = made.ids(whole)
    for rank, part in enumerate(parts):
        if rank < len(rows):
            assert torch.equal(made.ids(part), rows[rank::size])
        else:
            assert (part.num_tokens, part.num_targets) == (0, 0)
            assert (part.targets == IGNORED).all()
            assert all(mask.all() for key, mask in part.named.items() if key.endswith("mask"))
            if name == "streams":
                assert part.named["starts"].tolist() == [NOWHERE]
