"""Reading of untrusted JSON, with limits, and with errors that name the fix.

Python's own reader raises a RecursionError for thousands of brackets and a ValueError for a number
of thousands of digits, and accepts NaN and Infinity, which are not JSON.

Files of powernorm have a checksum as their last key, like that of `powernorm.checksums`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from powernorm.errors import InputError
from powernorm.files import check_regular

MAX_BYTES: Final = 64 * 2**20
"""Limit of a file. The largest of powernorm, subwords of two languages, have a twentieth of it."""
MAX_DEPTH: Final = 64
"""Limit of nested lists and objects; powernorm's files have less than ten."""
SEAL: Final = "sha256"
"""Key of the checksum."""


def read_json(path: Path, fix: str, *, infinite: bool = False) -> Any:
    """Return the value of a JSON file; of duplicate keys the last one counts.

    Args:
        path: path of the file.
        fix: advice about an unusable file, appended to every error.
        infinite: accept NaN and Infinity, which other programs write.

    Raises:
        InputError: the file cannot be read, is not JSON in UTF-8, or is larger or deeper than any
            file of powernorm; the message names file and line.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {fix}") from error
    return parse_json(content, str(path), fix, infinite=infinite)


def read_json_object(path: Path, fix: str) -> dict[str, Any]:
    """Return the object of a JSON file, checked and without its checksum.

    Args:
        path: path of the file.
        fix: as in `read_json`.

    Raises:
        InputError: as in `read_json` and `check_json`, or the value is not an object.
    """
    value = read_json(path, fix)
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds {type(value).__name__}, expected an object; {fix}")
    return check_json(value, path)


def seal_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a JSON file with a new checksum as the last key."""
    rest = {key: value for key, value in content.items() if key != SEAL}
    # Sorted by keys as they are read back, which are strings.
    return {**rest, SEAL: _digest(json.loads(json.dumps(rest)))}


def check_json(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file without its checksum.

    Files of earlier versions have none, and are not checked.

    Args:
        content: contents of the file.
        path: path of the file.

    Raises:
        InputError: the checksum does not match the contents.
    """
    rest = {key: value for key, value in content.items() if key != SEAL}
    if SEAL in content and content[SEAL] != _digest(rest):
        raise InputError(
            f"{path} was edited or damaged, its contents do not match its checksum: restore it, or "
            "give --accept-edits (to powernorm report, results, work, or compare with --resume) to "
            "accept it"
        )
    return rest


def _digest(rest: dict[str, Any]) -> str:
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    # Escapes in an edited file may be lone surrogates, which UTF-8 cannot encode.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def parse_json(
    content: bytes | str, source: str, fix: str, *, line: int | None = None, infinite: bool = False
) -> Any:
    """Return the value of a JSON text.

    Args:
        content: the text.
        source: name of the source in errors, such as its file.
        fix: as in `read_json`.
        line: line of the source, if the text is one of its lines.
        infinite: as in `read_json`.

    Raises:
        InputError: as in `read_json`.
    """
    place = source if line is None else f"{source}, line {line}"
    if len(content) > MAX_BYTES:
        raise InputError(f"{place}: more than {MAX_BYTES} bytes of JSON; {fix}")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, parse_constant=None if infinite else _refuse)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}: byte {error.start} is not UTF-8, so this is not JSON; {fix}"
        ) from error
    except json.JSONDecodeError as error:
        place = f"{source}, line {error.lineno if line is None else line}"
        raise InputError(f"{place}: not JSON ({error.msg}); {fix}") from error
    except _NoJsonError as error:
        raise InputError(f"{place}: holds {error}, which is not JSON; {fix}") from error
    except ValueError:
        raise InputError(f"{place}: holds a number of thousands of digits; {fix}") from None
    except (RecursionError, MemoryError):
        raise _too_deep(place, fix) from None
    if _depth_exceeds(value, MAX_DEPTH):
        raise _too_deep(place, fix)
    return value


class _NoJsonError(Exception):
    """A word that Python accepts as a number, but JSON does not."""


def _refuse(word: str) -> NoReturn:
    raise _NoJsonError(word)


def _too_deep(place: str, fix: str) -> InputError:
    return InputError(f"{place}: nested too deeply to be a file of powernorm; {fix}")


def _depth_exceeds(value: object, depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `depth`, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    while level and depth:
        depth -= 1
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
    return bool(level)
