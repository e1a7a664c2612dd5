"""Damaged zip archives: every damage ends in one of the listed errors."""

import io
import zipfile

import pytest
import torch

from powernorm.zip_reading import DAMAGES, open_zip

DIRECTORY = b"PK\x01\x02"
COMPRESSION = 10
"""Where the central directory's record of a member has its compression type."""


def archive_of_torch() -> bytes:
    content = io.BytesIO()
    torch.save({"weight": torch.ones(3, 4), "names": ["a", "b"]}, content)
    return content.getvalue()


def outcome_of(content: bytes) -> str:
    try:
        with open_zip(io.BytesIO(content)) as archive:
            return "whole" if archive.testzip() is None else "damaged"
    except DAMAGES as error:
        return type(error).__name__


def test_every_changed_bit_of_an_archive_ends_in_a_listed_error() -> None:
    content = archive_of_torch()
    outcomes = {outcome_of(content)}
    assert outcomes == {"whole"}
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            outcomes.add(outcome_of(changed))
    assert {"whole", "damaged", "BadZipFile", "RuntimeError", "NotImplementedError"} < outcomes


def test_an_offset_beyond_every_file_is_a_damage() -> None:
    content = bytearray(archive_of_torch())
    record = content.rindex(b"PK\x06\x06")  # of the 64-bit archive, with the directory's offset
    content[record + 55] = 129
    assert outcome_of(content) == "OverflowError"


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 93, 1])
def test_other_compressions_are_refused(compression: int) -> None:
    content = bytearray(archive_of_torch())
    content[content.index(DIRECTORY) + COMPRESSION] = compression
    with pytest.raises(zipfile.BadZipFile, match=rf"compression type {compression}, expected 0"):
        open_zip(io.BytesIO(content))
