"""Texts as bytes, in three splits: enwik8, text8, any file, or an embedded corpus; their batches.

`load_bytes` reads

- one file, such as the official `enwik8` or `text8`: its first 90 % are train, the next 5 % valid
  and the rest test, which for 100,000,000 bytes is the split of the literature.
- a folder with `train.txt`, `valid.txt` and `test.txt`, byte for byte. If it also has
  `train.txt.raw` and so on from Transformer-XL's preparation, these are read instead: the `.txt`
  files of that preparation hold the bytes as numbers.
- a folder with a file `enwik8` or `text8`.
- the name of an embedded corpus; each document, in UTF-8, ends with a newline.

The vocabulary always has all 256 bytes, so that it is independent of the text and no byte is
unknown.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED, STARTS, Batch, EvaluationBatches, TrainingBatches
from powernorm_lab.data.corpus import SPLITS, Corpus, Split
from powernorm_lab.data.embedded import EMBEDDED, embedded_corpus
from powernorm_lab.data.files import USER_LICENSE
from powernorm_lab.data.orders import Order
from powernorm_lab.tasks.lm_char.settings import CharacterSettings
from powernorm_lab.training.batches import RowData

VOCABULARY_SIZE: Final = 256
OFFICIAL_SIZES: Final[Mapping[str, int]] = {"enwik8": 100_000_000, "text8": 100_000_000}
"""Numbers of bytes of files with these names."""
MINIMUM: Final = 1000
"""Minimal number of bytes of a file to split."""
_PACKED: Final = (".zip", ".gz", ".xz", ".bz2", ".7z", ".zst")
# An unambiguous pattern: otherwise backtracking over damaged files of digits would take forever.
_NUMBERS: Final = re.compile(rb"(?:\d{1,3}[ \n]+)+\d{0,3}")
_LOOKED_AT: Final = 200


@dataclass(frozen=True, eq=False)
class EncodedBytes:
    """A text as bytes."""

    name: str
    source: str
    license: str
    splits: Mapping[Split, Tensor]
    """uint8, (number of bytes,)."""

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the splits."""
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(f"{split} {self.splits[split].numel()} ".encode())
            digest.update(self.splits[split].numpy().data)
        return digest.hexdigest()

    def start_of(self, split: Split) -> int:
        """Return the position of a split in the concatenation of all splits."""
        before = SPLITS[: SPLITS.index(split)]
        return sum(self.splits[earlier].numel() for earlier in before)


def load_bytes(source: str | None) -> EncodedBytes:
    """Return the text that a configuration names.

    Args:
        source: name of an embedded corpus, or path of the user's file or folder (use `./rt` for a
            file with the name of a corpus); None is the State of the Union addresses.

    Raises:
        InputError: as `read_bytes`.
    """
    if source is None or source in EMBEDDED:
        return _of_corpus(embedded_corpus() if source is None else embedded_corpus(source))
    return read_bytes(Path(source))


def read_bytes(path: Path) -> EncodedBytes:
    """Read the user's text.

    Raises:
        InputError: the file cannot be read, is too short, incomplete or packed, or holds numbers;
            the message names the file and the expected contents.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give a file such as enwik8, a folder with train.txt, "
            f"valid.txt and test.txt, or the name of an embedded corpus ({', '.join(EMBEDDED)})"
        )
    return _read_whole(path)


def _of_corpus(corpus: Corpus) -> EncodedBytes:
    splits = {
        split: _tensor("".join(f"{document}\n" for document in corpus.documents[split]).encode())
        for split in SPLITS
    }
    return EncodedBytes(corpus.name, corpus.source, corpus.license, splits)


def _read_folder(folder: Path) -> EncodedBytes:
    files = {split: _split_file(folder, split) for split in SPLITS}
    found = {split: path for split, path in files.items() if path is not None}
    if not found:
        for name in OFFICIAL_SIZES:
            if (folder / name).is_file():
                return _read_whole(folder / name)
        raise InputError(
            f"{folder} holds no text of bytes: expected train.txt, valid.txt and test.txt, or a "
            "file enwik8 or text8"
        )
    for split in SPLITS:
        if split not in found:
            names = " and ".join(path.name for path in found.values())
            raise InputError(f"{folder} has {names} but no {split}.txt: put it next to the others")
    splits = {split: _read_split(path) for split, path in found.items()}
    return EncodedBytes(folder.resolve().name, str(folder), USER_LICENSE, splits)


def _split_file(folder: Path, split: Split) -> Path | None:
    for name in (f"{split}.txt.raw", f"{split}.txt"):
        if (folder / name).exists():
            return folder / name
    return None


def _read_split(path: Path) -> Tensor:
    content = _read(path)
    if not content:
        raise InputError(f"{path} is empty: expected text")
    # Only files of Transformer-XL's preparation begin with so many numbers.
    if _NUMBERS.fullmatch(content[:_LOOKED_AT]):
        raise InputError(
            f"{path}, line 1: bytes written as numbers ({content[:12].decode()!r}); put the "
            f"{path.name}.raw of the same preparation next to it, or give the text itself"
        )
    return _tensor(content)


def _read_whole(path: Path) -> EncodedBytes:
    if path.suffix in _PACKED:
        raise InputError(f"{path} is packed: unpack it and give the file in it")
    content = _read(path)
    expected = OFFICIAL_SIZES.get(path.name)
    if expected is not None and len(content) != expected:
        raise InputError(
            f"{path} has {len(content):,} bytes and should have {expected:,}: fetch it again, or "
            "rename the file if this is intended"
        )
    if len(content) < MINIMUM:
        raise InputError(
            f"{path} has {len(content)} bytes: at least {MINIMUM} are needed to set some aside "
            "for validation and test"
        )
    whole = _tensor(content)
    first, second = len(content) * 90 // 100, len(content) * 95 // 100
    splits: dict[Split, Tensor] = {
        "train": whole[:first],
        "valid": whole[first:second],
        "test": whole[second:],
    }
    return EncodedBytes(path.stem, str(path), USER_LICENSE, splits)


def _read(path: Path) -> bytearray:
    try:
        # A bytearray, because a tensor needs writable memory.
        content = bytearray(path.stat().st_size)
        with path.open("rb", buffering=0) as file:
            view, size = memoryview(content), 0
            while read := file.readinto(view[size:]):
                size += read
        view.release()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): expected a file") from error
    del content[size:]
    return content


def _tensor(content: bytes | bytearray) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(
        bytearray(content) if isinstance(content, bytes) else content, dtype=torch.uint8
    )


# Batches of byte streams, in which every row continues that of the previous batch.


FIRST: Final = 10
"""The newline, as the context of a split's first byte, which is a target, too."""


class Streams(Order):
    """The starts of a text's segments, where the rows of a batch continue those of the last batch.

    The text is divided into as many streams of equal length as an update has rows, and each batch
    has the next segment of its streams. Each micro-batch of an update has different streams, so
    that an update has the same tokens for any division into micro-batches. Each epoch restarts all
    streams at an offset up to the remainder of the division, which is drawn from seed and epoch.
    Segments then begin at different positions, and no token is always left out.

    Args:
        num_tokens: number of tokens in the text.
        length: tokens in a segment.
        batch_size: number of streams, and of rows, of a batch.
        seed: seed of the offsets.
        batches_per_update: number of micro-batches of an update.

    Raises:
        InputError: the text is shorter than one update.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        length: int,
        batch_size: int,
        seed: int,
        batches_per_update: int = 1,
    ) -> None:
        self._num_rows = batch_size * batches_per_update
        self._num_segments = num_tokens // (self._num_rows * length)
        if not self._num_segments:
            raise InputError(
                f"the train split has {num_tokens} bytes, fewer than an update of "
                f"{self._num_rows} segments of {length}: lower data.batch_size, "
                "data.sequence_length or optimizer.accumulation"
            )
        super().__init__(self._num_segments * batches_per_update, seed)
        self._remainder = num_tokens - self._num_segments * self._num_rows * length
        self._length = length
        self._batch_size = batch_size

    def _drawn(self, epoch: int) -> Tensor:
        offset = torch.randint(self._remainder + 1, (), generator=self._generator(epoch))
        segments = torch.arange(self._num_segments)[:, None] * self._length
        streams = torch.arange(self._num_rows) * (self._num_segments * self._length)
        return (offset + segments + streams).view(-1, self._batch_size)


class TextStreams:
    """Segments of a text; the rows of a batch continue those of the previous batch.

    Args:
        text: a split, uint8, (number of bytes,).
        length: bytes in a segment.
        place: position of the text's first byte, see `STARTS`.
    """

    def __init__(self, text: Tensor, *, length: int, place: int = 0) -> None:
        self._text = text
        self._length = length
        self._place = place

    def batch(self, starts: Tensor, length: int | None = None, known: int = 0) -> Batch:
        """Return the segments of the text with first targets at some positions.

        Args:
            starts: positions of the first targets, int64, (batch,).
            length: bytes in a segment; None is the default length.
            known: number of targets at the beginning of each segment to ignore.
        """
        positions = starts[:, None] + torch.arange(-1, length or self._length)
        # The first byte of the text has no predecessor.
        segments = self._text[positions.clamp(min=0)].long()
        segments.masked_fill_(positions < 0, FIRST)
        targets = segments[:, 1:].clone()
        targets[:, :known] = IGNORED
        return Batch(
            named={"tokens": segments[:, :-1], STARTS: starts + self._place},
            targets=targets,
            num_tokens=targets.numel(),
            num_targets=targets.numel() - len(targets) * known,
        )

    def training(
        self, *, batch_size: int, seed: int, batches_per_update: int = 1
    ) -> TrainingBatches:
        """Return the batches of a training run; the arguments are those of `Streams`.

        Raises:
            InputError: the text is shorter than one update.
        """
        order = Streams(
            self._text.numel(),
            length=self._length,
            batch_size=batch_size,
            seed=seed,
            batches_per_update=batches_per_update,
        )
        return TrainingBatches(
            order, lambda starts, _: self.batch(starts), tokens_per_batch=batch_size * self._length
        )

    def evaluation(self, *, batch_size: int, max_tokens: int | None = None) -> EvaluationBatches:
        """Return the batches of an evaluation, in which each byte is a target once.

        The text is divided into `batch_size` streams of equal length, or fewer if they would be
        shorter than a segment, and each batch has the next segment of every stream; the last one
        may be shorter. The remainder at the end of the text, fewer bytes than streams, is evaluated
        in whole segments of one row; targets that were evaluated before are ignored.

        Args:
            batch_size: maximal number of streams.
            max_tokens: approximate number of bytes, from the beginning of every stream; None is
                all.
        """
        total, length = self._text.numel(), self._length
        num_streams = max(1, min(batch_size, total // length))
        whole = read = total // num_streams
        rest = total - num_streams * whole
        if max_tokens is not None and max_tokens < total:
            read = min(max(1, max_tokens // (num_streams * length)) * length, whole)
            rest = 0
        starts = torch.arange(num_streams) * whole
        parts = [(starts + done, min(length, read - done), 0) for done in range(0, read, length)]
        for begin in range(total - -(-rest // length) * length, total, length):
            known = max(0, total - rest - begin)
            parts.append((torch.tensor([begin]), length, known))
        return EvaluationBatches(parts, lambda part, _: self.batch(*part))


class CharacterData(RowData[EncodedBytes, CharacterSettings]):
    """Batches of byte streams; the target of each byte is the next one."""

    def rows(self, split: Split) -> TextStreams:
        """Return the streams of a split."""
        return TextStreams(
            self._encoded.splits[split],
            length=self._config.data.sequence_length,
            place=self._encoded.start_of(split),
        )

    def from_loss(self, loss: float) -> dict[str, float]:
        """Return bits per character (a byte) from a loss in nats."""
        return {"bits_per_character": loss / math.log(2)}
