"""Translating standard input."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TextIO

from powernorm.errors import InputError

PORTION: Final = 512
"""Sentences that are sorted by length and searched together."""


@dataclass(frozen=True)
class Options:
    """What the command line says about the search."""

    beam: int | None = None
    length_penalty: float | None = None
    num_best: int = 1
    scores: bool = False
    tokens: bool = False
    device: str = "auto"


def translate_stream(checkpoint: Path, options: Options, source: BinaryIO, out: TextIO) -> None:
    """Translate lines of UTF-8 and print each translation in a line.

    An empty line gives an empty one. At a terminal each line is translated when it is there.

    Raises:
        InputError: there is no such model, or a line is not UTF-8.
    """
    from powernorm.training.translator import load_translator

    translator = load_translator(
        checkpoint,
        beam_size=options.beam,
        length_penalty=options.length_penalty,
        num_best=options.num_best,
        tokens=options.tokens,
        device=options.device,
    )
    done = 0
    for lines in _portions(_lines(source), 1 if source.isatty() else PORTION):
        say_cut = partial(_say_cut, done, translator.max_length)
        done += len(lines)
        for ranked in translator.translate(lines, say_cut):
            for text, score in ranked:
                print(f"{score:.4f}\t{text}" if options.scores else text, file=out)
        out.flush()


def _say_cut(before: int, max_length: int, number: int, length: int) -> None:
    print(  # noqa: T201
        f"standard input, line {before + number + 1}: {length} subwords, of which the first "
        f"{max_length} are translated",
        file=sys.stderr,
    )


def _lines(source: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(source, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input, line {number}: byte 0x{line[error.start]:02x} is not UTF-8 text; "
                "convert it to UTF-8."
            ) from error


def _portions(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    portion: list[str] = []
    for line in lines:
        portion.append(line)
        if len(portion) == size:
            yield portion
            portion = []
    if portion:
        yield portion
