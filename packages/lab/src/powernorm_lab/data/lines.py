r"""Lines of text files, one at a time: only "\n" or "\r\n" ends a line."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from powernorm.errors import InputError

TextPair = tuple[str, str]
"""A sentence and its translation."""

_CHUNK: Final = 1 << 20
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_SUBWORD_NMT: Final = "@@ "
_PIECE_MARKS: Final = {
    _SUBWORD_NMT: (
        "subword-nmt",
        "set data.subwords=split and data.vocabulary_size=none, or give",
    ),
    "\u2581": ("SentencePiece", "set data.subwords to the path of its model, and give"),
}
"""Program and advice for texts with these marks."""
_SAMPLE: Final = 1000
"""Number of lines that are searched for marks."""


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without a byte order mark.

    Raises:
        InputError: the file cannot be read, is not UTF-8 text or is empty.
    """
    number = 0
    try:
        # str methods would also break lines at form feeds, U+2028 and the like.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                yield _text(content.removesuffix(b"\n").removesuffix(b"\r"), path, number)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): expected a UTF-8 text file"
        ) from error
    if not number:
        raise InputError(f"{path} is empty: expected text")


def _text(content: bytes, path: Path, number: int) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: byte 0x{content[error.start]:02x} is not UTF-8 text; convert "
            "the file to UTF-8"
        ) from error
    if "\x00" in text:
        raise InputError(f"{path}, line {number}: a zero byte; expected a UTF-8 text file")
    return text


def read_line_pairs(source: Path, target: Path) -> Iterator[TextPair]:
    """Yield pairs of corresponding lines of two files.

    Raises:
        InputError: as `read_lines`, or one file has more lines than the other.
    """
    sources, targets = read_lines(source), read_lines(target)
    number = 0
    for line in sources:
        other = next(targets, None)
        if other is None:
            raise _different(source, number + 1 + _count(sources), target, number)
        number += 1
        yield line, other
    if rest := _count(targets):
        raise _different(source, number, target, number + rest)


def read_columns(path: Path, *, has_header: bool = False) -> Iterator[TextPair]:
    """Yield the two columns of a tab-separated file; blank lines are empty pairs.

    Args:
        path: path of the file.
        has_header: whether to skip the first line.

    Raises:
        InputError: as `read_lines`, or a line does not have exactly one tab.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if has_header and number == 1:
            continue
        columns = line.split("\t")
        if len(columns) == 2:
            yield columns[0], columns[1]
        elif not line.strip():
            yield "", ""
        else:
            raise InputError(
                f"{path}, line {number}: {len(columns) - 1} tabs; expected one, between a sentence "
                "and its translation"
            )


def refuse_pieces(pairs: Iterator[TextPair], source: str) -> Iterator[TextPair]:
    """Yield the pairs unless their words are split into subwords already.

    Translations would then be scored on subwords, which are not comparable with scores on words.

    Args:
        pairs: the pairs.
        source: name of their source, for the message.

    Raises:
        InputError: more than a quarter of the first lines have subword marks.
    """
    first = list(islice(pairs, _SAMPLE))
    for mark, (name, fix) in _PIECE_MARKS.items():
        if _share(first, mark) > 1 / 4:
            raise InputError(
                f"{source} holds pieces of words ({mark.strip()!r}, as {name} writes them): {fix} "
                "the text before that step"
            )
    yield from first
    yield from pairs


def require_pieces(pairs: Iterator[TextPair], source: str) -> Iterator[TextPair]:
    """Yield the pairs if their words are split into subwords by subword-nmt.

    Raises:
        InputError: none of the first lines has its mark.
    """
    first = list(islice(pairs, _SAMPLE))
    if first and not _share(first, _SUBWORD_NMT):
        raise InputError(
            f"{source} holds no pieces of words ({_SUBWORD_NMT.strip()!r}): data.subwords=split "
            "needs every split segmented by the same codes; for words set data.subwords to the "
            "path of the codes or to learned"
        )
    yield from first
    yield from pairs


def _share(pairs: Sequence[TextPair], mark: str) -> float:
    return sum(mark in source or mark in target for source, target in pairs) / max(1, len(pairs))


def hash_files(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files, independent of their names.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        one = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    one.update(chunk)
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror}): expected a UTF-8 text file"
            ) from error
        digest.update(one.digest())
    return digest.hexdigest()


def _count(lines: Iterator[str]) -> int:
    return sum(1 for _ in lines)


def _different(source: Path, num_source: int, target: Path, num_target: int) -> InputError:
    return InputError(
        f"{source} has {num_source} lines and {target} has {num_target}: expected one sentence on "
        "each line, and its translation on the same line of the other file"
    )
