"""Damaged files of every format: a clean error or a correct parse, never another exception."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official_texts import REVIEWS, SOGOU, TREES, YELP, write_csv, write_imdb, write_rt, write_trees

from powernorm.errors import InputError
from powernorm_lab.data.corpus import SPLITS
from powernorm_lab.tasks.classify.data import encode_texts
from powernorm_lab.tasks.classify.readers import LabeledTexts
from powernorm_lab.tasks.classify.sources import load_texts, read_fetched

pytestmark = pytest.mark.usefixtures("own_cache")

Mutation = Callable[[bytes, random.Random], bytes]


def flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def drop_line(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def change_column(content: bytes, draw: random.Random) -> bytes:
    """Drop, double or swap a part between two separators of a line."""
    lines = content.split(b"\n")
    index = draw.randrange(len(lines))
    separator = draw.choice([b"\t", b",", b" ", b'"', b"(", b")"])
    parts = lines[index].split(separator)
    which = draw.randrange(len(parts))
    parts[which : which + 1] = [parts[which]] * draw.choice([0, 2])
    lines[index] = separator.join(parts)
    return b"\n".join(lines)


def insert_sign(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    sign = draw.choice([b"\x00", b"\xff", b"\r", b'"', b"\t", b"(", b")", b"\xef\xbb\xbf", b"\n"])
    return content[:place] + sign + content[place:]


MUTATIONS = (flip, cut, drop_line, change_column, insert_sign)


def write_table(folder: Path) -> Path:
    (folder / "train.tsv").write_text("label\tsentence\n1\ta b\n0\tc\n1\td\n")
    (folder / "test.tsv").write_text("1\ta b\n0\tc\n")
    return folder


def write_sogou(folder: Path) -> Path:
    (folder / "classes.txt").write_text("sports\nautomobile\nfinance\n")
    return write_csv(folder, SOGOU)


def write_fetched(folder: Path) -> Path:
    (folder / "reviews.csv").write_text(REVIEWS)
    return folder


WRITERS = (
    write_rt,
    write_imdb,
    write_trees,
    write_csv,
    write_sogou,
    write_table,
    write_fetched,
)


def load(folder: Path) -> LabeledTexts:
    reviews = folder / "reviews.csv"
    return read_fetched(reviews) if reviews.exists() else load_texts(str(folder))


def check(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw.choice(files)
    original = path.read_bytes()
    path.write_bytes(draw.choice(MUTATIONS)(original, draw))
    try:
        texts = load(folder)
        encoded = encode_texts(texts, vocabulary_size=300, max_length=8)
    except InputError as error:
        message = str(error)
        # The message names the file, or the data set if a split has no texts left.
        assert str(folder) in message or "PyPI" in message
        assert any(word in message for word in ("expected", "give", "convert")), message
    else:
        for split in SPLITS:
            part = encoded.splits[split]
            assert int(part.lengths.min()) >= 1
            assert int(part.lengths.sum()) == part.words.numel()
            assert int(part.labels.max()) < len(encoded.labels)
            assert len(part) == sum(1 for _ in texts.read[split]())
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("write", WRITERS)
def test_damaged_files_give_a_clean_error_or_a_correct_parse(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = write(tmp_path)

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.integers(0, 1 << 30))
    def mutated(seed: int) -> None:
        check(folder, seed)

    mutated()


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITERS)
def test_thousands_of_damaged_files(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = write(tmp_path)
    for seed in range(1500):
        check(folder, seed)


def test_the_files_are_whole_before_they_are_damaged(tmp_path: Path) -> None:
    assert TREES.count("\n") == 2
    assert YELP.count('"1"') == 2
    for index, write in enumerate(WRITERS):
        folder = tmp_path / str(index)
        folder.mkdir()
        texts = load(write(folder))
        assert [row for split in SPLITS for row in texts.read[split]()]
