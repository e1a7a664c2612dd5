"""Texts with classes in three splits, read lazily."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from powernorm_lab.data.corpus import Split

RT_VALID: Final = 964 / 10661
RT_TEST: Final = 1089 / 10661
"""Fractions of RT's sentences in the valid and test splits of Xu et al. 2019 (section 2.2)."""
VALID_OF_TRAIN: Final = 0.3
"""Fraction of the training texts for validation if there is no valid split (Wang et al. 2022,
App. A)."""
LEAST: Final = 20
"""Minimal number of texts to split."""
_SEED: Final = 0


class LabeledText(NamedTuple):
    """A text with its class and its place in a file."""

    label: str
    text: str
    path: Path
    line: int
    """Line number, from 1; the last line of a text with several lines."""

    @property
    def place(self) -> str:
        """Return file and line, for messages."""
        return f"{self.path}, line {self.line}"


Read = Callable[[], Iterator[LabeledText]]
"""Returns an iterator over texts, from the beginning at each call."""


@dataclass(frozen=True, slots=True)
class LabeledTexts:
    """A data set that is read lazily.

    Its readers raise an `InputError` for a damaged file during iteration.
    """

    name: str
    source: str
    license: str
    read: Mapping[Split, Read]
    labels: tuple[str, ...] | None = None
    """The classes in order; None for those of the train split in alphabetical order."""


def shuffled_parts(
    texts: Iterable[LabeledText], *, valid: float = RT_VALID, test: float = RT_TEST
) -> dict[Split, Read]:
    """Divide texts at random with a fixed seed.

    Args:
        texts: all texts.
        valid: fraction of the valid split.
        test: fraction of the test split.
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
    """Return a `Read` over texts in memory."""
    return partial(iter, rows)


def with_drawn_valid(train: Read, test: Read) -> dict[Split, Read]:
    """Move a random fraction of about `VALID_OF_TRAIN` of the train split to the valid split.

    Each text is drawn independently with a fixed seed, so that files of any size are streamed.
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
