"""Reading JSON that others may have written: within bounds, and with errors that say what to do.

Python's own reader ends in a RecursionError on thousands of brackets, in a ValueError on a number
of thousands of digits, and takes NaN and Infinity, which are no JSON.

Files of ours carry a checksum as their last key, as `powernorm.checksums` has it for other kinds.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from powernorm.errors import InputError
from powernorm.files import check_regular

MAX_BYTES: Final = 64 * 2**20
"""Of a file. The largest of ours, subwords of two languages, have a twentieth of that."""
MAX_DEPTH: Final = 64
"""Of lists and objects in one another; ours have less than ten."""
SEAL: Final = "sha256"
"""Key of the checksum."""


def read_json(path: Path, fix: str) -> Any:
    """Return the value that a JSON file holds; of equal keys the last one counts.

    Args:
        path: of the file.
        fix: what to do about one that cannot be used; the end of every error.

    Raises:
        InputError: it cannot be read, is not JSON in UTF-8, or is larger or deeper than any file
            of powernorm; the message names file and line.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {fix}") from error
    return parse_json(content, str(path), fix)


def read_json_object(path: Path, fix: str) -> dict[str, Any]:
    """Return the object that a JSON file holds, checked and without its seal.

    Args:
        path: of the file.
        fix: as in `read_json`.

    Raises:
        InputError: as `read_json` and `check_json`, or it holds something else.
    """
    value = read_json(path, fix)
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds {type(value).__name__}, expected an object; {fix}")
    return check_json(value, path)


def seal_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with its seal, the last key, in place of an older one."""
    rest = {key: value for key, value in content.items() if key != SEAL}
    # As it is read back, keys are strings, by which they are sorted.
    return {**rest, SEAL: _digest(json.loads(json.dumps(rest)))}


def check_json(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a JSON file without its seal.

    Files of earlier versions have none, and are not checked.

    Args:
        content: as it was read.
        path: of the file.

    Raises:
        InputError: the seal is of another content.
    """
    rest = {key: value for key, value in content.items() if key != SEAL}
    if SEAL in content and content[SEAL] != _digest(rest):
        raise InputError(
            f"{path} was edited or damaged, its content does not have its checksum: restore it, or "
            "give --accept-edits (to powernorm report, results, work, or compare with --resume) to "
            "take it as it is"
        )
    return rest


def _digest(rest: dict[str, Any]) -> str:
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    # Escapes in an edited file may stand for halves of letters, which UTF-8 does not have.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def parse_json(content: bytes | str, source: str, fix: str, *, line: int | None = None) -> Any:
    """Return the value that JSON text stands for.

    Args:
        content: the text.
        source: what to call it in errors, such as its file.
        fix: as in `read_json`.
        line: of the source, where the text is one of its lines.

    Raises:
        InputError: as `read_json`.
    """
    place = source if line is None else f"{source}, line {line}"
    if len(content) > MAX_BYTES:
        raise InputError(f"{place}: more than {MAX_BYTES} bytes of JSON; {fix}")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}: byte {error.start} is not UTF-8, so this is no JSON; {fix}"
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
    """A word that Python takes for a number."""


def _refuse(word: str) -> NoReturn:
    raise _NoJsonError(word)


def _too_deep(place: str, fix: str) -> InputError:
    return InputError(f"{place}: nested too deeply to be a file of powernorm; {fix}")


def _depth_exceeds(value: object, depth: int) -> bool:
    """Return whether lists and objects are nested deeper, without recursion."""
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
