r"""Lines of text files, one at a time: only "\n" or "\r\n" ends a line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from powernorm.errors import InputError

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


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
