"""No pickle, however made, runs anything or takes more memory than its own size warrants."""

import os
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lab.data.byte_mutations import mutated
from lab.data.official_images import array, pickled
from powernorm.errors import InputError
from powernorm.lab.tasks.image.inert_pickles import ByteArray, load_inert

PROTOCOL = b"\x80\x02"


def load(content: bytes) -> object:
    return load_inert(content, "data_batch_1")


def test_a_batch_as_python_2_wrote_it() -> None:
    pixels = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    found = load(pickled({b"labels": [3, 0, 1000], b"data": pixels, b"name": b"x" * 300}))
    assert isinstance(found, dict)
    data = found.pop(b"data")
    assert found == {b"labels": [3, 0, 1000], b"name": b"x" * 300}
    assert isinstance(data, ByteArray)
    assert (data.shape, data.content) == ((3, 4), bytes(range(12)))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_batch_as_python_3_writes_it(protocol: int) -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    value = {b"labels": [1, 2], "names": ["a", "b"], b"data": pixels, b"nothing": None}
    found = load(pickle.dumps(value, protocol))
    assert isinstance(found, dict)
    data = found.pop(b"data")
    assert found == {b"labels": [1, 2], "names": ["a", "b"], b"nothing": None}
    assert isinstance(data, ByteArray)
    assert (data.shape, data.content) == ((3, 4), bytes(range(12)))


class _Calls:
    def __init__(self, function: object, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


def _attacks(marker: Path) -> dict[str, bytes]:
    command = f"touch {marker}"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    line = code.encode() + b"\n"
    build = b"cnumpy\ndtype\n}U\x08__call__cos\nsystem\nsb"
    return {
        "os.system": pickle.dumps(_Calls(os.system, command), 2),
        "os.system, protocol 0": pickle.dumps(_Calls(os.system, command), 0),
        "eval": pickle.dumps(_Calls(eval, code), 4),
        "exec": pickle.dumps([_Calls(exec, code)], 2),
        "in a dictionary": pickle.dumps({b"data": _Calls(eval, code)}, 2),
        "INST": b"(S" + repr(code).encode() + b"\ni__builtin__\neval\n.",
        "OBJ": PROTOCOL + b"(c__builtin__\neval\nV" + line + b"o.",
        "NEWOBJ": PROTOCOL + b"cbuiltins\nobject\n)\x81.",
        "EXT1": PROTOCOL + b"\x82\x01.",
        "a persistent reference": PROTOCOL + b"U\x01aQ.",
        "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__class__\x93.",
        "another name of numpy": b"\x80\x02cnumpy.testing._private.utils\nrunstring\n.",
        "a codec": PROTOCOL + b"c_codecs\nencode\nX\x01\x00\x00\x00aU\x03zip\x86R.",
        "a state for a class": PROTOCOL + build + b".",
        "an array's class called": PROTOCOL + b"cnumpy\nndarray\nK\x01\x85R.",
        "another class made": PROTOCOL
        + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85U\x01b\x87R.",
        "objects in an array": PROTOCOL + array(b"12345678", (1,), b"O8") + b".",
        "floats": PROTOCOL + array(b"12345678", (1,), b"f8") + b".",
        "too few bytes": PROTOCOL + array(b"123", (2, 2)) + b".",
        "a negative size": PROTOCOL + array(b"12", (-1, -2)) + b".",
    }


ATTACKS = tuple(_attacks(Path("marker")))


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_is_run(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "was_run"
    content = _attacks(marker)[name]
    with pytest.raises(InputError, match="data_batch_1 is not a pickle of CIFAR-10, or damaged"):
        load(content)
    assert not marker.exists()


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """Python's own unpickler runs what is refused here."""
    for name in ("os.system", "eval", "exec", "INST"):
        marker = tmp_path / name
        pickle.loads(_attacks(marker)[name])
        assert marker.exists(), name


@pytest.mark.parametrize(
    "content",
    [
        PROTOCOL + b"Nr" + struct.pack("<I", 2**31) + b".",  # a place far up in the memo
        PROTOCOL + b"N" + b"\x96" + struct.pack("<Q", 2**40) + b"0.",  # an array of bytes
        PROTOCOL + b"\x8e" + struct.pack("<Q", 2**40) + b"0.",  # bytes
        PROTOCOL + b"T" + struct.pack("<i", 2**31 - 1) + b"0.",  # a string
        PROTOCOL + b"\x8b" + struct.pack("<i", 2**30) + b"0.",  # a number
        b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",  # a frame
    ],
)
def test_sizes_that_a_pickle_claims_are_not_believed(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="damaged"):
            load(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_values_are_not_nested_deeper_than_a_batch_needs() -> None:
    # A dictionary's key of a million tuples in each other overflows the stack of Python itself.
    with pytest.raises(InputError, match="more instructions"):
        load(PROTOCOL + b"})" + b"\x85" * 100_000 + b"Ns.")


def test_a_list_that_holds_itself_is_data() -> None:
    found = load(PROTOCOL + b"]q\x00h\x00a.")
    assert isinstance(found, list)
    assert found[0] is found


BATCH = pickled({b"labels": [3, 0], b"data": torch.zeros(2, 3, dtype=torch.uint8), b"x": b"name"})


def _refusal(content: bytes, otherwise: str) -> str:
    try:
        load(content)
    except InputError as error:
        return str(error)
    return otherwise


@settings(max_examples=300)
@given(mutated(BATCH))
def test_mutated_pickles_are_read_or_refused(content: bytes) -> None:
    assert "data_batch_1" in _refusal(content, "data_batch_1")


@pytest.mark.slow
@settings(max_examples=5000)
@given(mutated(BATCH))
def test_thousands_of_mutated_pickles(content: bytes) -> None:
    assert "data_batch_1" in _refusal(content, "data_batch_1")
