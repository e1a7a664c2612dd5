"""Reading the pickles of CIFAR-10 without running anything that they say.

A pickle is a program: loaded as usual it may call any function. Here its instructions are looked
through first, and only those that make numbers, texts, lists, dictionaries and a few arrays are
let pass; the names that it may call are replaced by inert stand-ins, so that not even numpy's
constructors see what it holds.
"""

import io
import math
import pickle
import pickletools
import re
from typing import Any, Final

from powernorm.errors import InputError

MAX_STEPS: Final = 1_000_000
"""Instructions; an official file has about 60,000."""
MAX_BUILT: Final = 256
"""Tuples, calls and states; an official file has about 10. Values cannot be nested deeper."""

_PLAIN: Final = re.compile(
    r"PROTO|FRAME|STOP|MARK|NONE|NEWTRUE|NEWFALSE|BININT[12]?|(SHORT_)?BIN(STRING|BYTES|UNICODE)"
    r"|EMPTY_(LIST|DICT|TUPLE)|APPENDS?|SETITEMS?|(LONG_)?BIN(PUT|GET)|MEMOIZE"
)
_BUILT: Final = re.compile(r"TUPLE[123]?|LIST|DICT|(STACK_)?GLOBAL|REDUCE|BUILD")


class ByteArray:
    """Stand-in of a numpy array of unsigned bytes.

    Attributes:
        shape: its sizes.
        content: its numbers, the last dimension the fastest.
    """

    __slots__ = ("content", "shape")

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.content = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, content = state
        if not (isinstance(kind, _Kind) and kind.code in ("u1", "|u1", "B", "uint8")):
            raise pickle.UnpicklingError("an array of another type than unsigned bytes")
        if not isinstance(content, bytes) or is_fortran or not _are_sizes(shape):
            raise pickle.UnpicklingError("an array in another order than that of C")
        if math.prod(shape) != len(content):
            raise pickle.UnpicklingError(f"an array of {len(content)} bytes with sizes {shape}")
        self.shape, self.content = shape, content


def _are_sizes(shape: object) -> bool:
    return isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)


class _Kind:
    """Stand-in of numpy's dtype."""

    __slots__ = ("code",)

    def __init__(self, code: str | bytes, *rest: object) -> None:
        del rest
        self.code = code.decode("latin1") if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: object) -> None:
        """The order of the bytes is of no matter to single ones."""


class _ArrayType:
    """Stand-in of the class `numpy.ndarray`, which is only ever named."""

    __slots__ = ()

    def __new__(cls) -> "_ArrayType":
        raise pickle.UnpicklingError("an array that is made in an unusual way")


class _EmptyArray:
    """Stand-in of numpy's `_reconstruct`, which makes an array before its state is known."""

    __slots__ = ()

    def __new__(cls, kind: object, shape: object, code: object) -> ByteArray:  # type: ignore[misc]
        del shape, code
        if kind is not _ArrayType:
            raise pickle.UnpicklingError("an object that is not an array")
        return ByteArray()


class _Latin1:
    """Stand-in of `_codecs.encode`, by which Python 3 writes bytes for Python 2."""

    __slots__ = ()

    def __new__(cls, text: str, encoding: object) -> bytes:  # type: ignore[misc]
        if encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError(f"a text in the encoding {encoding!r}")
        return text.encode("latin1")


_STAND_INS: Final[dict[tuple[str, str], type]] = {
    ("numpy", "ndarray"): _ArrayType,
    ("numpy", "dtype"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _EmptyArray,
    ("numpy._core.multiarray", "_reconstruct"): _EmptyArray,
    ("_codecs", "encode"): _Latin1,
}


class _InertUnpickler(pickle.Unpickler):
    """Knows no name but those that have a stand-in."""

    def find_class(self, module: str, name: str, /) -> type:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"the name {module}.{name}, which is not for data")
        return _STAND_INS[module, name]

    def persistent_load(self, pid: object, /) -> object:
        raise pickle.UnpicklingError(f"a reference to something outside, {pid!r}")


def load_inert(content: bytes, source: str) -> object:
    """Return what a pickle of plain data holds.

    Args:
        content: of the file.
        source: its name, for messages.

    Returns:
        Dictionaries, lists, tuples, numbers, texts, bytes and `ByteArray`. Texts that Python 2
        wrote come as bytes.

    Raises:
        InputError: it is damaged, or has anything else in it.
    """
    try:
        _check_instructions(content)
        return _InertUnpickler(io.BytesIO(content), encoding="bytes").load()
    # A damaged pickle may raise nearly anything.
    except Exception as error:
        raise InputError(
            f"{source} is not a pickle of CIFAR-10, or damaged: {error or type(error).__name__}; "
            "expected plain data, which is all that is ever loaded; fetch the file again"
        ) from error


def _check_instructions(content: bytes) -> None:
    num_built = 0
    instructions = pickletools.genops(content)
    for number, (instruction, argument, position) in enumerate(instructions, start=1):
        name = instruction.name
        if _BUILT.fullmatch(name):
            num_built += 1
        elif not _PLAIN.fullmatch(name):
            raise pickle.UnpicklingError(f"the instruction {name} at byte {position}")
        if number > MAX_STEPS or num_built > MAX_BUILT:
            raise pickle.UnpicklingError("more instructions than a file of images has")
        # A table of remembered values is as long as the highest number in it.
        if name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > number:
            raise pickle.UnpicklingError(f"the number {argument} at byte {position}")
