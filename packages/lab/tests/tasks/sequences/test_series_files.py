"""Series from files, and errors for damaged files."""

import lzma
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from powernorm.errors import InputError
from powernorm_lab.tasks.sequences.data import DEFAULT, SeriesSet, load_series

HEADER = "#made\n@problemName Made\n@timeStamps false\n@classLabel true a b\n@data\n"


def line(length: int, label: str, start: float = 0.0) -> str:
    frames = [start + frame for frame in range(length)]
    return ":".join(",".join(str(sign * one) for one in frames) for sign in (1, -1)) + f":{label}\n"


ROWS = [(length, label) for label in "ab" for length in (2, 3, 4, 5, 6)]


def write_ts(folder: Path, train: str = "", test: str = "") -> Path:
    content = HEADER + "".join(line(*row) for row in ROWS)
    (folder / "Made_TRAIN.ts").write_text(train or content)
    (folder / "Made_TEST.ts").write_text(test or HEADER + line(3, "b") + line(1, "a"))
    return folder


def table() -> pd.DataFrame:
    rows = [
        {"id": number, "step": step, "label": label, "x": step, "y": -step}
        for number, (length, label) in enumerate(ROWS)
        for step in range(length)
    ]
    return pd.DataFrame(rows)


def assert_same(one: SeriesSet, other: SeriesSet) -> None:
    assert one.classes == other.classes
    for split, part in one.splits.items():
        torch.testing.assert_close(part.frames, other.splits[split].frames)
        assert part.lengths.tolist() == other.splits[split].lengths.tolist()
        assert part.labels.tolist() == other.splits[split].labels.tolist()


def test_japanese_vowels_are_the_official_ones() -> None:
    series = load_series(None)
    assert series.name == DEFAULT
    assert series.classes == tuple("123456789")
    counts = {split: len(part.lengths) for split, part in series.splits.items()}
    assert counts == {"train": 216, "valid": 54, "test": 370}
    assert series.splits["valid"].labels.bincount().tolist() == [6] * 9
    lengths = torch.cat([part.lengths for part in series.splits.values()])
    assert (int(lengths.min()), int(lengths.max())) == (7, 29)
    train = series.splits["train"].frames
    torch.testing.assert_close(train.mean(0), torch.zeros(12), atol=1e-4, rtol=0)
    torch.testing.assert_close(train.std(0), torch.ones(12), atol=1e-3, rtol=0)


def test_a_folder_of_ts_files(tmp_path: Path) -> None:
    series = load_series(str(write_ts(tmp_path)))
    assert series.name == "Made"
    # Every fifth series of a class is valid: the one with 6 frames.
    assert series.splits["valid"].lengths.tolist() == [6, 6]
    assert series.splits["test"].labels.tolist() == [1, 0]
    assert series.splits["test"].lengths.tolist() == [3, 1]
    frames = series.splits["test"].frames * series.std + series.mean
    torch.testing.assert_close(frames[:3, 0], torch.arange(3.0))
    torch.testing.assert_close(frames[:3, 1], -torch.arange(3.0))
    by_file = load_series(str(tmp_path / "Made_TRAIN.ts"))
    assert_same(by_file, series)
    assert by_file.fingerprint == series.fingerprint
    compressed = lzma.compress((tmp_path / "Made_TEST.ts").read_bytes())
    (tmp_path / "Made_TEST.ts").unlink()
    (tmp_path / "Made_TEST.ts.xz").write_bytes(compressed)
    assert_same(load_series(str(tmp_path)), series)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_are_read_as_ts_files(tmp_path: Path, kind: str) -> None:
    """Rows may be in any order if a column has the order."""
    rows = table()
    shuffled = rows.sample(frac=1, random_state=0).sort_values("id", kind="stable")
    test = pd.DataFrame(
        {"id": ["p"] * 3 + ["q"], "label": list("bbba"), "x": [0, 1, 2, 0], "y": [0, -1, -2, 0]}
    )
    for name, content in (("train", shuffled), ("test", test)):
        path = tmp_path / f"{name}.{kind}"
        if kind == "csv":
            content.to_csv(path, index=False)
        else:
            content.to_parquet(path)
    ts = tmp_path / "ts"
    ts.mkdir()
    assert_same(load_series(str(tmp_path)), load_series(str(write_ts(ts))))


def test_other_series_have_the_classes_and_the_scale_of_the_training(tmp_path: Path) -> None:
    series = load_series(str(write_ts(tmp_path)))
    (tmp_path / "other").mkdir()
    other = write_ts(tmp_path / "other", train=HEADER + line(9, "b", 50) * 5)
    like = load_series(str(other), series)
    assert like.classes == series.classes
    assert like.splits["valid"].labels.tolist() == [1]
    torch.testing.assert_close(like.mean, series.mean)
    with pytest.raises(InputError, match="the class 'c': expected 2 features and the classes of"):
        load_series(str(write_ts(tmp_path / "other", test=HEADER + line(2, "c"))), series)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("1,2:3,?:a\n", r"Made_TRAIN.ts, line 6: '\?' is no number: fill missing frames"),
        ("1,2:3:a\n", "line 6: features of 2, 1 frames: expected features of equal length"),
        ("a\n", "line 6: features of no frames"),
        ("1,2:a\n1:2:a\n", "series of 1 or 2 features"),
        ("@timeStamps true\n", "line 6: frames with time stamps are not read"),
        ("@classLabel false\n", "line 6: the series have no classes"),
        ("\n", r"series of 2 features \(train 0, test 2, valid 0\)"),
        ("1:2:a\n" * 4, "expected series in every split"),
    ],
)
def test_damaged_ts_files_are_refused(tmp_path: Path, train: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_series(str(write_ts(tmp_path, train=HEADER + train)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drop": "label"}, "has the columns id, step, x, y: expected id, label, optionally step"),
        ({"x": "much"}, "train.csv, line 2: 'much' in column 'x' is no finite number: fill"),
        ({"y": [0.0, *[math.inf] * 39]}, "train.csv, line 3: 'inf' in column 'y' is no finite"),
        ({"id": [*["a"] * 39, None]}, "train.csv, line 41: 'nan' in column 'id' is missing"),
        ({"step": [*range(39), None]}, "train.csv, line 41: 'nan' in column 'step' is missing"),
        ({"label": range(40)}, "the series 0 has several classes in column 'label'"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    rows = table()
    if "drop" in changes:
        rows = rows.drop(columns=[str(changes.pop("drop"))])
    rows.assign(**changes).to_csv(tmp_path / "train.csv", index=False)
    rows.to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(InputError, match=says):
        load_series(str(tmp_path))


def test_folders_without_series_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no series at"):
        load_series(str(tmp_path / "missing"))
    with pytest.raises(InputError, match="there are no series at"):
        load_series(str(tmp_path))
    write_ts(tmp_path)
    with pytest.raises(InputError, match="there are no series at"):
        load_series(str(tmp_path / "Made_TEST.ts"))
    (tmp_path / "Made_TEST.ts").unlink()
    with pytest.raises(InputError, match="must hold one test split of Made, found none"):
        load_series(str(tmp_path))
    (tmp_path / "Made_TEST.ts.xz").write_bytes(b"no xz")
    with pytest.raises(InputError, match="cannot be read"):
        load_series(str(tmp_path))
