"""Texts with a class each, in three splits, read as often as they are asked for."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from powernorm_lab.data.corpus import Split

RT_VALID: Final = 964 / 10661
RT_TEST: Final = 1089 / 10661
"""Parts of the sentences that Xu et al. 2019 set aside of RT (section 2.2)."""
VALID_OF_TRAIN: Final = 0.3
"""Part of the training texts that becomes the valid split where there is none (Wang et al. 2022,
App. A)."""
LEAST: Final = 20
"""Texts that are needed to set some aside."""
_SEED: Final = 0


class LabeledText(NamedTuple):
    """One text, its class, and where it was read."""

    label: str
    text: str
    path: Path
    line: int
    """Counted from 1; of a text of several lines the last."""

    @property
    def place(self) -> str:
        """Return where it was read, for messages."""
        return f"{self.path}, line {self.line}"


Read = Callable[[], Iterator[LabeledText]]
"""Goes through texts, from the beginning at each call."""


@dataclass(frozen=True, slots=True)
class LabeledTexts:
    """A data set; nothing of it is kept in memory that need not be.

    Its readers raise `InputError` where a file is damaged, while they go through it.
    """

    name: str
    source: str
    license: str
    read: Mapping[Split, Read]
    labels: tuple[str, ...] | None = None
    """The classes in their order; None are those of the train split in the order of the
    alphabet."""


def shuffled_parts(
    texts: Iterable[LabeledText], *, valid: float = RT_VALID, test: float = RT_TEST
) -> dict[Split, Read]:
    """Divide texts at random, always in the same way.

    Args:
        texts: all of them.
        valid: part of them that is the valid split.
        test: part of them that is the test split.
    """
    rows = list(texts)
    random.Random(_SEED).shuffle(rows)
    num_valid, num_test = round(len(rows) * valid), round(len(rows) * test)
    num_train = len(rows) - num_valid - num_test
    return {
        "train": reading(rows[:num_train]),
        "valid": reading(rows[num_train : num_train + num_valid]),
        "test": reading(rows[num_train + num_valid :]),
    }


def reading(rows: Sequence[LabeledText]) -> Read:
    """Return what goes through texts that are in memory."""
    return partial(iter, rows)


def with_drawn_valid(train: Read, test: Read) -> dict[Split, Read]:
    """Take the valid split out of the train split, text by text at random, always the same ones.

    About `VALID_OF_TRAIN` of them: files of any size are gone through without being kept.
    """
    return {
        "train": lambda: _drawn(train(), is_valid=False),
        "valid": lambda: _drawn(train(), is_valid=True),
        "test": test,
    }


def _drawn(texts: Iterator[LabeledText], *, is_valid: bool) -> Iterator[LabeledText]:
    draw = random.Random(_SEED)
    for text in texts:
        if (draw.random() < VALID_OF_TRAIN) == is_valid:
            yield text
