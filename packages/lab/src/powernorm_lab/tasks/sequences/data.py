"""Series with classes: readers of `.ts` files (UEA and UCR archives), CSV and Parquet; batches.

A table is in long form, with a row for each frame: a column `id` of the series, a column `label`
with the same value in all rows of a series, and an optional column `step` with the order of frames
(by default the order of rows). All other columns are features.
"""

import lzma
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.integrations.extras import needed_for
from powernorm_lab.data.batch import MASK, Batch
from powernorm_lab.data.cache import cache_key
from powernorm_lab.data.catalog import data_set, embedded_texts
from powernorm_lab.data.corpus import SPLITS, EvaluatedSplit, Split
from powernorm_lab.data.files import USER_LICENSE, SplitFiles
from powernorm_lab.data.orders import Order, ShuffledByLength
from powernorm_lab.data.rows import PaddedRows
from powernorm_lab.tasks.sequences.settings import SequenceSettings
from powernorm_lab.training.batches import RowData

DEFAULT: Final = "japanese-vowels"
ID, STEP, LABEL = "id", "step", "label"
"""Columns of a table that are not features."""
VALID_PERIOD: Final = 5
"""Without a valid split, every fifth training series of a class is used for validation."""
_FILES: Final = SplitFiles(
    pattern=re.compile(
        r"(?:(?P<name>.+)_)?(?P<split>train|valid|dev|test)\.(?:ts|ts\.xz|csv|parquet)",
        re.IGNORECASE,
    ),
    expected="NAME_TRAIN.ts and NAME_TEST.ts, or train.csv and test.csv, or the same as .parquet",
    what="sets of series",
    optional=("valid",),
)


class Series(NamedTuple):
    """A series and its class."""

    label: str
    frames: Tensor
    """float32, (frames, features)."""


@dataclass(frozen=True)
class SeriesSplit:
    """The concatenated series of a split."""

    frames: Tensor
    """float32, (frames of all series, features)."""
    lengths: Tensor
    """int64, (series,): numbers of frames, at least 1."""
    labels: Tensor
    """int64, (series,): numbers of the classes."""


@dataclass(frozen=True)
class SeriesSet:
    """Series in three splits, standardized by mean and variance of the train split."""

    name: str
    source: str
    license: str
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    """`mean` and `std` of the original frames, float32, (features,)."""
    splits: Mapping[Split, SeriesSplit]

    @property
    def num_features(self) -> int:
        """Return the number of features of a frame."""
        return len(self.mean)

    @property
    def fingerprint(self) -> str:
        """Return a hash of all data of the batches."""
        parts = [self.splits[split] for split in SPLITS]
        return cache_key(
            task="sequences",
            classes=self.classes,
            data=[
                [part.frames.double().sum().item(), part.lengths.tolist(), part.labels.tolist()]
                for part in parts
            ],
        )


def load_series(source: str | None, like: SeriesSet | None = None) -> SeriesSet:
    """Return the series that a configuration names.

    Args:
        source: a folder, the train file of a set, or `japanese-vowels`, the default.
        like: series with the classes and the scale of a model; None uses those of the train split.

    Raises:
        InputError: there are no such series, a file is damaged, or the series do not fit `like`.
    """
    if source in (None, DEFAULT):
        entry = data_set(DEFAULT)
        texts = zip(entry.files, embedded_texts(entry), strict=True)
        train, test = (list(_from_ts(text, Path(file.path))) for file, text in texts)
        return _joined(DEFAULT, entry.origin, entry.license, {"train": train, "test": test}, like)
    path = Path(str(source))
    if path.is_dir():
        folder, name = path, _FILES.only_name(_FILES.names(path), path)
    else:
        folder, name = path.parent, _FILES.train_name(path) if path.exists() else None
    if name is None:
        raise InputError(f"there are no series at {path}: give a folder with {_FILES.expected}")
    read = {split: _read(file) for split, file in _FILES.of(folder, name).items()}
    return _joined(name or folder.resolve().name, str(path), USER_LICENSE, read, like)


def _read(path: Path) -> list[Series]:
    """Read the series of one file."""
    if path.suffix.lower() in (".csv", ".parquet"):
        return list(_from_table(path))
    try:
        content = path.read_bytes()
        text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): expected UTF-8 text") from error
    return list(_from_ts(text, path))


def _from_ts(text: str, path: Path) -> Iterator[Series]:
    """Yield the series of a `.ts` file: features separated by `:`, frames by `,`, the class last.

    Raises:
        InputError: a line has another format; the message names it.
    """
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        key, _, value = line.lower().partition(" ")
        if key == "@timestamps" and value.strip() == "true":
            raise InputError(f"{where}: frames with time stamps are not read: remove the stamps")
        if key in ("@classlabel", "@targetlabel") and value.startswith("false"):
            raise InputError(f"{where}: the series have no classes, which this task needs")
        if not line.strip() or line[0] in "#@%":
            continue
        *features, label = line.split(":")
        columns = [_numbers(feature, where) for feature in features]
        if not columns or len({len(column) for column in columns}) > 1:
            sizes = ", ".join(str(len(column)) for column in columns) or "no"
            raise InputError(
                f"{where}: features of {sizes} frames: expected features of equal length separated "
                "by ':', and the class after the last ':'"
            )
        yield Series(label.strip(), torch.tensor(columns).T)


def _numbers(feature: str, where: str) -> list[float]:
    cells = feature.split(",")
    for cell in cells:
        if not _is_number(cell):
            raise InputError(f"{where}: {cell[:40]!r} is no number: {_FILLED}")
    return [float(cell) for cell in cells]


_FILLED: Final = "fill missing frames first, or leave the series out"


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _from_table(path: Path) -> Iterator[Series]:
    """Yield the series of a table in long form, in the order of their first rows.

    Raises:
        InputError: a column is missing or not numeric, or a series has several classes.
    """
    with needed_for(f"reading {path.name}"):
        import pandas as pd

        read: Any = pd.read_csv if path.suffix.lower() == ".csv" else pd.read_parquet
        try:
            table = read(path)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}): expected a table") from error
    missing = [name for name in (ID, LABEL) if name not in table.columns]
    features = [name for name in table.columns if name not in (ID, STEP, LABEL)]
    if missing or not features:
        raise InputError(
            f"{path} has the columns {', '.join(map(str, table.columns))[:200]}: expected {ID}, "
            f"{LABEL}, optionally {STEP}, and a column for each feature, with a row for each frame"
        )
    for name in table.columns:
        cells = table[name]
        lost = cells.isna()
        if name not in (ID, LABEL):
            numbers = pd.to_numeric(cells, errors="coerce").astype("float64")
            lost = ~numbers.abs().lt(math.inf)
        if lost.any():
            row = int(lost.to_numpy().argmax())
            # Line 1 of a CSV file is the header.
            where = f"line {row + 2}" if path.suffix.lower() == ".csv" else f"row {row + 1}"
            kind = "missing" if cells.isna().iloc[row] else "no finite number"
            cell = str(cells.iloc[row])[:40]
            raise InputError(f"{path}, {where}: {cell!r} in column {name!r} is {kind}: {_FILLED}")
    for key, rows in table.groupby(ID, sort=False):
        if rows[LABEL].nunique(dropna=False) != 1:
            raise InputError(
                f"{path}: the series {key!r} has several classes in column {LABEL!r}: give all of "
                "its rows the same class"
            )
        ordered = rows.sort_values(STEP, kind="stable") if STEP in table.columns else rows
        frames = torch.tensor(ordered[features].to_numpy(dtype="float32"))
        yield Series(str(rows[LABEL].iloc[0]), frames)


def _joined(
    name: str, source: str, license: str, read: Mapping[Split, list[Series]], like: SeriesSet | None
) -> SeriesSet:
    """Return the standardized splits, including a valid split.

    Raises:
        InputError: a split is empty, numbers of features differ, or a class is not in train.
    """
    parts = dict(read)
    if "valid" not in parts:
        parts["train"], parts["valid"] = _set_aside(parts["train"])
    widths = {series.frames.shape[1] for part in parts.values() for series in part}
    if len(widths) != 1 or any(not part for part in parts.values()):
        sizes = ", ".join(f"{split} {len(part)}" for split, part in parts.items())
        raise InputError(
            f"{source} has series of {' or '.join(map(str, sorted(widths))) or 'no'} features "
            f"({sizes}): expected series in every split, all with the same features"
        )
    frames = torch.cat([series.frames for series in parts["train"]])
    if like is None:
        classes = tuple(sorted({series.label for series in parts["train"]}, key=_class_order))
        # A constant feature becomes 0.
        mean, std = frames.mean(0), frames.std(0, correction=0).clamp(min=1e-6)
    else:
        classes, mean, std = like.classes, like.mean, like.std
    known = {label: number for number, label in enumerate(classes)}
    other = {series.label for part in parts.values() for series in part} - known.keys()
    if other or frames.shape[1] != len(mean):
        what = f"the class {min(other)!r}" if other else f"{frames.shape[1]} features"
        raise InputError(
            f"{source} has {what}: expected {len(mean)} features and the classes of training, "
            f"{', '.join(classes)[:200]}"
        )
    splits = {split: _stacked(parts[split], known, mean, std) for split in SPLITS}
    return SeriesSet(name, source, license, classes, mean, std, splits)


def _class_order(label: str) -> tuple[float, str]:
    """Return the sort key of a class, with numbers in numeric order."""
    return (float(label), "") if _is_number(label) else (float("inf"), label)


def _set_aside(series: Sequence[Series]) -> tuple[list[Series], list[Series]]:
    """Split off every fifth series of a class for validation."""
    parts: tuple[list[Series], list[Series]] = ([], [])
    counts: dict[str, int] = defaultdict(int)
    for one in series:
        counts[one.label] += 1
        parts[counts[one.label] % VALID_PERIOD == 0].append(one)
    return parts


def _stacked(
    part: Sequence[Series], known: Mapping[str, int], mean: Tensor, std: Tensor
) -> SeriesSplit:
    return SeriesSplit(
        frames=(torch.cat([series.frames for series in part]) - mean) / std,
        lengths=torch.tensor([len(series.frames) for series in part]),
        labels=torch.tensor([known[series.label] for series in part]),
    )


# Batches of padded series, and the sensitivity of predictions to padding.


SERIES: Final = "series"
"""Name of the model's input, float32, (rows, frames, features)."""


class SeriesRows(PaddedRows):
    """The series of a split.

    Args:
        part: the series.
        by_length: whether training batches have series of similar length.
    """

    unit = "series"

    def __init__(self, part: SeriesSplit, *, by_length: bool = False) -> None:
        super().__init__(part.lengths)
        self._part = part
        self._by_length = by_length

    def batch(self, rows: Tensor) -> Batch:
        """Return a batch of series by number, padded to the longest."""
        places, padding = self.places(rows)
        return Batch(
            named={
                SERIES: self._part.frames[places].masked_fill_(padding[..., None], 0),
                MASK: padding,
            },
            targets=self._part.labels[rows],
            num_tokens=int(self.lengths[rows].sum()),
            num_targets=len(rows),
            positional=(SERIES,),
        )

    def order(self, *, batch_size: int, seed: int) -> Order:
        """Return the order of series in training."""
        if not self._by_length:
            return super().order(batch_size=batch_size, seed=seed)
        return ShuffledByLength(self.lengths, batch_size=batch_size, seed=seed, unit=self.unit)


class SequenceData(RowData[SeriesSet, SequenceSettings]):
    """Batches of padded series with classes."""

    def rows(self, split: Split) -> SeriesRows:
        """Return the series of a split."""
        part = self._encoded.splits[split]
        return SeriesRows(part, by_length=self._config.data.by_length)

    def scores(
        self, split: EvaluatedSplit, model: nn.Module, device: torch.device, *, brief: bool = False
    ) -> Mapping[str, float]:
        """Return accuracy, F1, calibration error, and the sensitivity of predictions to padding.

        All series are evaluated in three ways: in batches in the order of the file, in batches of
        similar length, and alone. The sensitivity is the percentage of predictions that differ from
        those alone, and the largest difference of a logit.
        """
        part, size = self._encoded.splits[split], self._evaluation_batch_size
        rows = SeriesRows(part)
        number = len(part.labels)
        padded = _logits(model, rows, torch.arange(number).split(size), device)
        scores = {"accuracy": 100 * float((padded.argmax(1) == part.labels).float().mean())}
        if brief:
            return scores
        # Two seconds, which a run waits for at its end only.
        from torchmetrics.functional.classification import (
            multiclass_calibration_error,
            multiclass_f1_score,
        )

        by_length = part.lengths.argsort(stable=True)
        bucket = _logits(model, rows, by_length.split(size), device)
        alone = _logits(model, rows, _without_padding(part.lengths, size), device)
        f1 = multiclass_f1_score(padded.argmax(1), part.labels, padded.shape[1], average="macro")
        error = multiclass_calibration_error(padded.softmax(1), part.labels, padded.shape[1])
        return scores | {
            "macro_f1": 100 * float(f1),
            "calibration_error": 100 * float(error),
            "padding_changed": 100 * _share_changed(padded, alone),
            "bucket_changed": 100 * _share_changed(bucket, alone),
            "padding_difference": max(
                float((other - alone).abs().max()) for other in (padded, bucket)
            ),
        }


@torch.no_grad()
def _logits(
    model: nn.Module, rows: SeriesRows, parts: Iterable[Tensor], device: torch.device
) -> Tensor:
    """Return the logits of all series, float32 on the CPU, computed in the given batches."""
    found = [(part, model(**rows.batch(part).to(device).inputs()).float().cpu()) for part in parts]
    logits = torch.empty(len(rows), found[0][1].shape[1])
    for part, values in found:
        logits[part] = values
    return logits


def _without_padding(lengths: Tensor, size: int) -> Iterator[Tensor]:
    """Yield batches of series of equal length, equivalent to each alone but faster."""
    for length in lengths.unique():
        yield from torch.nonzero(lengths == length)[:, 0].split(size)


def _share_changed(logits: Tensor, alone: Tensor) -> float:
    return float((logits.argmax(1) != alone.argmax(1)).double().mean())
